"""Births and deaths of storages, replayed through the allocator model: peaks, and the smallest cap they fit under."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import length_hint

from autofit.memory.allocator import AllocatorOutOfMemoryError, CachingAllocator
from autofit.memory.config import DEFAULT_CONFIG, ROUND_LARGE, AllocatorConfig
from autofit.memory.pool import Block

# (id, bytes) is the birth of a storage, (id, 0) its death. Plain tuples: a step has thousands.
Event = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Peaks:
    """What a replay reached; if it ran out of memory, what it reached up to the event that failed."""

    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retries: int
    out_of_memory_at: int | None = None

    @property
    def fits(self) -> bool:
        """Whether every birth found room."""
        return self.out_of_memory_at is None


def replay(events: Sequence[Event], limit_bytes: int | None = None, config: AllocatorConfig = DEFAULT_CONFIG) -> Peaks:
    """Runs `events` through a fresh allocator under `limit_bytes`, up to the first birth that finds no room."""
    allocator = CachingAllocator(limit_bytes, config)
    failed_at = _run(allocator, events)
    return Peaks(
        allocator.peak_requested_bytes,
        allocator.peak_allocated_bytes,
        allocator.peak_reserved_bytes,
        allocator.retries,
        failed_at,
    )


def fit_threshold(events: Sequence[Event], config: AllocatorConfig = DEFAULT_CONFIG) -> int:
    """The cap in bytes under which `events` run through, while under one byte less they do not.

    It is at most the reserved peak, and usually less: an allocator that is out of room gives back what it merely caches
    and tries again. Giving back early may happen to pack better, so some cap further down may work again; none that is
    below the bytes requested at once does. With garbage collection the figure is exact to 2 MiB only.
    """
    by_halves = config.garbage_collection_threshold > 0  # its threshold moves with the cap, so no two caps run alike
    unlimited = CachingAllocator(None, config)
    _run(unlimited, events)
    fits, fails = unlimited.granted_bytes, -1
    while by_halves and not replay(events, fits, config).fits:
        fits += ROUND_LARGE
    while fits - fails > (ROUND_LARGE if by_halves else 1):
        middle = (fits + fails) // 2
        allocator = CachingAllocator(middle, config)
        if _run(allocator, events) is None:
            fits = middle if by_halves else allocator.granted_bytes
        else:
            fails = middle if by_halves or allocator.refused_bytes is None else allocator.refused_bytes - 1
    return fits


def _run(allocator: CachingAllocator, events: Sequence[Event]) -> int | None:
    """Feeds `events` to `allocator`; the index of the birth that found no room, None when all did."""
    malloc, free = allocator.malloc, allocator.free
    live: dict[int, Block] = {}
    remaining = iter(events)
    try:
        for storage, nbytes in remaining:
            if nbytes:
                live[storage] = malloc(nbytes)
            else:
                free(live.pop(storage))
    except AllocatorOutOfMemoryError:
        return len(events) - length_hint(remaining) - 1
    return None
