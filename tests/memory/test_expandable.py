"""Expandable segments: what they map, and what they give back."""

from __future__ import annotations

import pytest

from autofit.memory import AllocatorConfig, AllocatorOutOfMemoryError, CachingAllocator
from autofit.units import MiB
from tests.memory.invariants import check


def expandable(limit: int | None = None) -> CachingAllocator:
    return CachingAllocator(limit, AllocatorConfig(expandable_segments=True))


def test_a_segment_grows_by_whole_units() -> None:
    """Large blocks share one segment that grows by 20 MiB, small ones one that grows by 2 MiB."""
    allocator = expandable()
    live = [allocator.malloc(30 * MiB)]
    assert allocator.reserved_bytes == 40 * MiB
    live.append(allocator.malloc(15 * MiB))  # 10 MiB are mapped already
    assert allocator.reserved_bytes == 60 * MiB
    live.append(allocator.malloc(MiB))
    assert allocator.reserved_bytes == 62 * MiB
    assert [block.size for block in live] == [30 * MiB, 15 * MiB, MiB]
    assert len(list(allocator.segments())) == 2
    check(allocator, live)


def test_every_remainder_is_split_off() -> None:
    """Also in the large pool a remainder of 512 B is worth keeping."""
    allocator = expandable()
    assert allocator.malloc(20 * MiB - 512).size == 20 * MiB - 512
    assert allocator.malloc(2 * MiB).address == 20 * MiB - 512


def test_streams_have_segments_of_their_own() -> None:
    """What one stream mapped, another does not see."""
    allocator = expandable()
    allocator.free(allocator.malloc(20 * MiB, stream=1))
    allocator.malloc(20 * MiB, stream=2)
    assert allocator.reserved_bytes == 40 * MiB


def test_units_inside_free_blocks_are_given_back() -> None:
    """Emptying the cache unmaps whole units and keeps the ends that share one with a block in use."""
    allocator = expandable()
    first, middle, last = (allocator.malloc(nbytes * MiB) for nbytes in (30, 50, 20))
    allocator.free(middle)  # 30 to 80 MiB: of it, 40 to 80 are whole units
    allocator.empty_cache()
    assert allocator.reserved_bytes == 60 * MiB
    check(allocator, [first, last])
    again = allocator.malloc(45 * MiB)
    assert again.address == 30 * MiB
    assert allocator.reserved_bytes == 100 * MiB
    check(allocator, [first, again, last])


def test_holes_become_one_again() -> None:
    """Neighbouring unmapped space is merged, up to the segment's end."""
    allocator = expandable()
    blocks = [allocator.malloc(20 * MiB) for _ in range(3)]
    for block in (blocks[0], blocks[2], blocks[1]):
        allocator.free(block)
        allocator.empty_cache()
        check(allocator, [other for other in blocks if not other.free])
    assert [len(segment) for segment in allocator.segments()] == [1]


def test_growing_reuses_the_free_block_before_a_hole() -> None:
    """A block that is too small is not passed over: what it lacks is mapped behind it."""
    allocator = expandable()
    allocator.malloc(10 * MiB)
    grown = allocator.malloc(25 * MiB)
    assert grown.address == 10 * MiB
    assert allocator.reserved_bytes == 40 * MiB


def test_a_block_that_cannot_grow_is_preferred() -> None:
    """Best fit goes by what a block can grow to, so the growing end is spared."""
    allocator = expandable()
    inner, _, end = allocator.malloc(12 * MiB), allocator.malloc(18 * MiB), allocator.malloc(10 * MiB)
    allocator.free(inner)
    allocator.free(end)
    assert allocator.malloc(9 * MiB).address == inner.address


def test_the_limit_is_held_against_the_request_not_the_units() -> None:
    """The source tests the segment size of the request; the units that then hold it may go past the limit."""
    allocator = expandable(limit=32 * MiB)
    allocator.malloc(30 * MiB)
    assert allocator.reserved_bytes == 40 * MiB
    with pytest.raises(AllocatorOutOfMemoryError):
        allocator.malloc(11 * MiB)
    assert allocator.retries == 1
