"""What must hold in the allocator model at every moment, whatever was asked of it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from autofit.memory import Block, CachingAllocator
from autofit.memory.expandable import Unmapped
from autofit.memory.pool import ADDRESS_BITS
from autofit.units import MiB


def check(allocator: CachingAllocator, live: Iterable[Block]) -> None:
    """Blocks tile segments, free neighbours are merged, the free sets are in order and the sums are right."""
    segments = list(allocator.segments())
    blocks = [block for segment in segments for block in segment]
    mapped = [block for block in blocks if not isinstance(block, Unmapped)]
    used = [block for block in mapped if not block.free]
    for segment in segments:
        _check_segment(segment, expandable=allocator.config.expandable_segments)
    assert {id(block) for block in used} == {id(block) for block in live}
    assert allocator.allocated_bytes == sum(block.size for block in used)
    assert allocator.requested_bytes == sum(block.requested for block in used)
    assert allocator.reserved_bytes == sum(block.size for block in mapped)
    assert allocator.peak_allocated_bytes >= allocator.allocated_bytes
    assert allocator.peak_reserved_bytes >= allocator.reserved_bytes
    if allocator.limit_bytes is not None and not allocator.config.expandable_segments:
        assert allocator.peak_reserved_bytes <= allocator.limit_bytes
    _check_free_sets(allocator, [block for block in mapped if block.free])


def _check_segment(segment: list[Block], *, expandable: bool) -> None:
    assert segment[0].previous is None
    for lower, upper in pairwise(segment):
        assert upper.previous is lower
        assert lower.address + lower.size == upper.address
        assert not (lower.free and upper.free)
        assert not (isinstance(lower, Unmapped) and isinstance(upper, Unmapped))
    for block in segment:
        assert block.size > 0
        assert block.size % 512 == 0
        if not isinstance(block, Unmapped) and not block.free:
            assert block.requested <= block.size
        if not block.pool.family.small and not expandable:
            assert block.size > MiB


def _check_free_sets(allocator: CachingAllocator, free: list[Block]) -> None:
    pools = [pool for family in (allocator._small, allocator._large) for pool in family.values()]
    assert sum(len(pool.blocks) for pool in pools) == len(free)
    for pool in pools:
        assert pool.keys == sorted(pool.keys)
        assert pool.keys == [block.size << ADDRESS_BITS | block.address for block in pool.blocks]
        assert all(block.free and block.pool is pool for block in pool.blocks)
