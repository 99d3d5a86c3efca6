"""The caching allocator as a model: its rules one by one, and what must hold after any sequence of calls."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit.memory import AllocatorConfig, AllocatorOutOfMemoryError, Block, CachingAllocator
from autofit.units import KiB, MiB
from tests.memory.invariants import check

CONFIGS = {
    "default": AllocatorConfig(),
    "max_split": AllocatorConfig(max_split_size=24 * MiB),
    "collecting": AllocatorConfig(garbage_collection_threshold=0.6),
    "rounding": AllocatorConfig(roundup_power2_divisions=(4,) * 16),
    "expandable": AllocatorConfig(expandable_segments=True),
    "all at once": AllocatorConfig(
        max_split_size=32 * MiB,
        garbage_collection_threshold=0.5,
        roundup_power2_divisions=(2,) * 16,
        large_segment_size=24 * MiB,
    ),
}

sizes = st.one_of(
    st.integers(1, 4 * KiB), st.integers(1, MiB), st.integers(MiB - 512, 12 * MiB), st.integers(10 * MiB, 70 * MiB)
)
# A request, or where in the list of blocks in use the one to free lies; now and then the cache is emptied.
calls = st.lists(
    st.one_of(sizes, sizes, st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True), st.none()),
    max_size=60,
)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("limit", [None, 64 * MiB, 150 * MiB])
@settings(max_examples=60, deadline=None)
@given(calls=calls, streams=st.integers(1, 2))
def test_invariants_hold_after_any_calls(
    name: str, limit: int | None, calls: list[int | float | None], streams: int
) -> None:
    """Blocks tile segments, neighbours are merged, statistics add up, and the limit is kept, out of memory or not."""
    allocator = CachingAllocator(limit, CONFIGS[name])
    live: list[Block] = []
    for index, call in enumerate(calls):
        if call is None:
            allocator.empty_cache()
        elif isinstance(call, float):
            if live:
                allocator.free(live.pop(int(call * len(live))))
        else:
            try:
                live.append(allocator.malloc(call, index % streams))
            except AllocatorOutOfMemoryError:
                assert limit is not None
        check(allocator, live)
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    check(allocator, [])
    assert (allocator.allocated_bytes, allocator.requested_bytes, allocator.reserved_bytes) == (0, 0, 0)


def test_small_requests_share_a_segment() -> None:
    """A small request takes 2 MiB, the low part of it first, and the next one what follows."""
    allocator = CachingAllocator()
    first, second = allocator.malloc(100), allocator.malloc(1000)
    assert (first.address, first.size, second.address, second.size) == (0, 512, 512, 1024)
    assert (allocator.allocated_bytes, allocator.requested_bytes, allocator.reserved_bytes) == (1536, 1100, 2 * MiB)


@pytest.mark.parametrize(
    ("nbytes", "block", "reserved"),
    [
        (19 * MiB, 20 * MiB, 20 * MiB),  # a remainder of 1 MiB stays with the block
        (19 * MiB - 512, 19 * MiB - 512, 20 * MiB),  # one above 1 MiB is split off
        (3 * MiB, 3 * MiB, 20 * MiB),
        (MiB, MiB, 2 * MiB),
    ],
)
def test_large_blocks_are_split_only_above_a_mebibyte(nbytes: int, block: int, reserved: int) -> None:
    """`allocated_bytes` counts the whole block, not the request."""
    allocator = CachingAllocator()
    if 10 * MiB <= nbytes:
        allocator.free(allocator.malloc(20 * MiB))
    taken = allocator.malloc(nbytes)
    assert (taken.size, allocator.allocated_bytes, allocator.reserved_bytes) == (block, block, reserved)


def test_best_fit_prefers_the_smallest_then_the_lowest() -> None:
    """Of the free blocks that suffice, the smallest; of equal ones, the one at the lowest address."""
    allocator = CachingAllocator()
    blocks = [allocator.malloc(nbytes * MiB) for nbytes in (40, 30, 30)]
    addresses = [block.address for block in blocks]
    for block in reversed(blocks):
        allocator.free(block)
    assert [allocator.malloc(29 * MiB).address for _ in range(2)] == addresses[1:]
    assert allocator.malloc(29 * MiB).address == addresses[0]


def test_streams_do_not_share_blocks() -> None:
    """What one stream freed, another cannot have."""
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(30 * MiB, stream=1))
    allocator.malloc(30 * MiB, stream=2)
    assert allocator.reserved_bytes == 60 * MiB
    allocator.malloc(30 * MiB, stream=1)
    assert allocator.reserved_bytes == 60 * MiB


def test_out_of_room_the_cache_is_given_back() -> None:
    """A segment that does not fit next to cached ones makes the allocator give those back and try once more."""
    allocator = CachingAllocator(100 * MiB)
    allocator.free(allocator.malloc(60 * MiB))
    allocator.malloc(512)
    allocator.malloc(70 * MiB)
    assert (allocator.retries, allocator.reserved_bytes, allocator.peak_reserved_bytes) == (1, 72 * MiB, 72 * MiB)


def test_out_of_memory_says_how_much_was_missing() -> None:
    """The error carries the request, its segment, what is held and the limit; the allocator goes on working."""
    allocator = CachingAllocator(50 * MiB)
    kept = allocator.malloc(31 * MiB)
    with pytest.raises(AllocatorOutOfMemoryError, match=r"21\.0 MiB") as caught:
        allocator.malloc(21 * MiB)
    error = caught.value
    assert (error.requested_bytes, error.segment_bytes, error.limit_bytes) == (21 * MiB, 22 * MiB, 50 * MiB)
    assert (error.allocated_bytes, error.reserved_bytes, allocator.retries) == (32 * MiB, 32 * MiB, 1)
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)
    allocator.free(kept)
    assert allocator.malloc(21 * MiB).size == 21 * MiB


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_request_of_nothing_is_refused(nbytes: int) -> None:
    """Tensors without bytes never reach the allocator, so a call for one is a mistake."""
    with pytest.raises(ValueError, match="positive"):
        CachingAllocator().malloc(nbytes)


def test_freeing_twice_is_refused() -> None:
    """A second free of the same block is an error, also after it was merged into its neighbour."""
    allocator = CachingAllocator()
    first, second = allocator.malloc(512), allocator.malloc(512)
    allocator.free(first)
    allocator.free(second)
    for block in (first, second):
        with pytest.raises(ValueError, match="freed before"):
            allocator.free(block)


def test_peaks_start_again_where_things_stand() -> None:
    """`reset_peaks` forgets the past and keeps counting retries."""
    allocator = CachingAllocator(100 * MiB)
    allocator.free(allocator.malloc(80 * MiB))
    allocator.malloc(90 * MiB)
    allocator.reset_peaks()
    peaks = allocator.peak_allocated_bytes, allocator.peak_requested_bytes, allocator.peak_reserved_bytes
    assert peaks == (90 * MiB, 90 * MiB, 90 * MiB)
    assert allocator.retries == 1


def test_oversize_blocks_are_neither_split_nor_given_to_small_requests() -> None:
    """With max_split_size a large block only serves requests of nearly its size, and as a whole."""
    allocator = CachingAllocator(None, AllocatorConfig(max_split_size=40 * MiB))
    allocator.free(allocator.malloc(100 * MiB))
    assert allocator.malloc(30 * MiB).size == 30 * MiB  # below the limit: no oversize block for it
    assert allocator.malloc(80 * MiB).size == 80 * MiB  # the free one is 20 MiB too large
    assert allocator.malloc(81 * MiB).size == 100 * MiB
    assert allocator.reserved_bytes == (100 + 30 + 80) * MiB


def test_a_request_of_exactly_the_split_size_is_oversize() -> None:
    """It may have an oversize block, and has it as a whole."""
    allocator = CachingAllocator(None, AllocatorConfig(max_split_size=40 * MiB))
    allocator.free(allocator.malloc(54 * MiB))
    assert allocator.malloc(40 * MiB).size == 54 * MiB


@pytest.mark.parametrize(
    ("cached", "limit", "nbytes", "left", "retries"),
    [
        ((50, 90), 150, 30, {90}, 0),  # the smallest oversize block gives room
        ((50, 60, 90), 210, 100, {50}, 0),  # none is large enough: from the largest down, until the sum is
        ((50,), 240, 200, set(), 1),  # all of them together are not: the whole cache goes, as without the option
    ],
)
def test_just_enough_oversize_is_given_back(
    cached: tuple[int, ...], limit: int, nbytes: int, left: set[int], retries: int
) -> None:
    """Under a limit, max_split_size gives back oversize blocks first, which does not count as a retry."""
    allocator = CachingAllocator(limit * MiB, AllocatorConfig(max_split_size=40 * MiB))
    for block in [allocator.malloc(size * MiB) for size in cached]:
        allocator.free(block)
    allocator.malloc(nbytes * MiB)
    held = {sum(block.size for block in blocks) // MiB for blocks in allocator.segments()}
    assert (held, allocator.retries) == (left | {nbytes}, retries)


def collecting(limit: int) -> CachingAllocator:
    return CachingAllocator(limit * MiB, AllocatorConfig(garbage_collection_threshold=0.5))


def test_garbage_collection_takes_what_lay_unused_longest() -> None:
    """Above the threshold, segments of more than average age go before a new one is asked for."""
    allocator = collecting(limit=200)
    old = allocator.malloc(60 * MiB)
    allocator.free(old)
    for _ in range(3):
        allocator.free(allocator.malloc(70 * MiB))
    allocator.malloc(71 * MiB)  # asks for a segment while 130 MiB are reserved, 30 above the threshold
    held = {sum(block.size for block in blocks) // MiB for blocks in allocator.segments()}
    assert (held, allocator.retries) == ({70, 72}, 0)


def test_garbage_collection_takes_the_only_segment() -> None:
    """Its age is the average, and that is old enough."""
    allocator = collecting(limit=200)
    allocator.free(allocator.malloc(110 * MiB))
    allocator.malloc(120 * MiB)
    assert (allocator.reserved_bytes, allocator.retries) == (120 * MiB, 0)


def test_garbage_collection_waits_for_the_threshold() -> None:
    """Up to the threshold everything stays cached."""
    allocator = collecting(limit=300)
    for nbytes in (60, 70, 71):
        allocator.free(allocator.malloc(nbytes * MiB))
    assert allocator.reserved_bytes == (60 + 70 + 72) * MiB


def test_garbage_collection_needs_a_limit() -> None:
    """The threshold is a share of the limit, so without one nothing is collected."""
    allocator = CachingAllocator(None, AllocatorConfig(garbage_collection_threshold=0.1))
    for nbytes in (60, 70, 80):
        allocator.free(allocator.malloc(nbytes * MiB))
    assert allocator.reserved_bytes == 210 * MiB


def test_a_smaller_large_segment_is_honoured() -> None:
    """`large_segment_size` replaces the 20 MiB that requests up to 10 MiB share."""
    allocator = CachingAllocator(None, AllocatorConfig(large_segment_size=12 * MiB))
    allocator.malloc(2 * MiB)
    assert allocator.reserved_bytes == 12 * MiB


def test_an_adopted_segment_is_as_it_was() -> None:
    """A segment from a recording brings its blocks in use and its free ones, and they count."""
    allocator = CachingAllocator()
    used, free = allocator.adopt_segment(4096, small=False, blocks=[(5 * MiB, 5 * MiB - 100), (15 * MiB, None)])
    check(allocator, [used])
    assert (used.address, free.address, free.free) == (4096, 4096 + 5 * MiB, True)
    assert (allocator.allocated_bytes, allocator.requested_bytes) == (5 * MiB, 5 * MiB - 100)
    assert allocator.malloc(4 * MiB).address == free.address
    allocator.free(used)
    assert allocator.reserved_bytes == 20 * MiB
