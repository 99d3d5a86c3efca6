"""A model of PyTorch's CUDA caching allocator: told requests and frees, it says where blocks go and what is reserved.

Source of the rules: `c10/cuda/CUDACachingAllocator.cpp`, torch 2.5 to 2.14; in the default configuration they are the
same throughout. The letters in `_obtain` are the order in which it tries its remedies.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from autofit.memory.config import DEFAULT_CONFIG, SMALL_MAX, AllocatorConfig
from autofit.memory.expandable import ExpandableSegments
from autofit.memory.pool import ADDRESS_BITS, Block, Pool, Pools
from autofit.units import format_bytes


class AllocatorOutOfMemoryError(Exception):
    """A request that neither a free block nor a new segment under the limit could serve; sizes in bytes.

    Giving every unused segment back did not help either. The allocator stays usable, as the real one does.
    """

    def __init__(
        self,
        message: str,
        *,
        requested_bytes: int = 0,
        segment_bytes: int = 0,
        allocated_bytes: int = 0,
        reserved_bytes: int = 0,
        limit_bytes: int = 0,
    ) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes
        self.segment_bytes = segment_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.limit_bytes = limit_bytes


class CachingAllocator:
    """The caching allocator of one device, without the device.

    `limit_bytes` is the soft limit that `set_per_process_memory_fraction` sets on a real device; None is no limit.
    Segments get increasing addresses, which only matter where two free blocks of one size compete.

    Statistics, all in bytes: `allocated_bytes` (blocks in use), `requested_bytes` (what they were asked for),
    `reserved_bytes` (segments), a `peak_…` of each, and `retries`, the times that every unused segment was given back
    in the hope of room.

    Compared with recordings of real GPUs, block by block: the default configuration, one stream, no limit. Not
    validated: the path under a limit, several streams, and every option of `AllocatorConfig`. Not modelled: blocks that
    `record_stream` keeps back, and private pools (CUDA graphs).
    """

    def __init__(self, limit_bytes: int | None = None, config: AllocatorConfig = DEFAULT_CONFIG) -> None:
        self.limit_bytes = limit_bytes
        self.config = config
        self.allocated_bytes = self.requested_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_requested_bytes = self.peak_reserved_bytes = 0
        self.retries = 0
        # Under every limit from the first up to below the second the run would have been the same.
        self.granted_bytes = 0
        self.refused_bytes: int | None = None
        self._collects = limit_bytes is not None and config.garbage_collection_threshold > 0
        # Whether sizes are multiples of 512 B and the search is by size alone, so that `malloc` can do both in place.
        self._plain = not (
            self._collects
            or config.expandable_segments
            or config.max_split_size
            or any(divisions > 1 for divisions in config.roundup_power2_divisions)
        )
        self._small = Pools(small=True, config=config)
        self._large = Pools(small=False, config=config)
        self._expandable = (
            ExpandableSegments(self._reserve, large_unit=config.large_segment_size)
            if config.expandable_segments
            else None
        )
        self._segments: dict[int, Block] = {}
        self._next_address = 0

    def malloc(self, nbytes: int, stream: int = 0) -> Block:
        """The block that a request of `nbytes` > 0 gets; raises AllocatorOutOfMemoryError if there is no room."""
        if nbytes <= 0:
            raise ValueError(f"A request of {nbytes} bytes never reaches the allocator; it must be positive.")
        if self._plain:
            size = (nbytes + 511) & -512
            pool = (self._small if size <= SMALL_MAX else self._large)[stream]
            at = bisect_left(pool.keys, size << ADDRESS_BITS)
        else:
            size = self.config.round_size(nbytes)
            pool = (self._small if size <= SMALL_MAX else self._large)[stream]
            at = self._search(pool, size)
        if at < len(pool.keys):
            del pool.keys[at]
            block = pool.blocks.pop(at)
        else:
            block = self._obtain(pool, size, nbytes)
        remainder = block.size - size
        if remainder >= pool.split_from and size < pool.split_below:
            following = block.next
            rest = Block(block.address + size, remainder, pool, block, following)
            if following is not None:
                following.previous = rest
            block.next = rest
            block.size = size
            pool.insert(rest)
        block.free = False
        block.requested = nbytes
        self.requested_bytes = requested = self.requested_bytes + nbytes
        if requested > self.peak_requested_bytes:
            self.peak_requested_bytes = requested
        self.allocated_bytes = allocated = self.allocated_bytes + block.size
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        return block

    def free(self, block: Block) -> None:
        """Takes back a block from `malloc`, which must not be used again; raises ValueError when it is free already."""
        if block.free:
            raise ValueError(f"{block} was freed before.")
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested
        block.pool.put(block)

    def empty_cache(self) -> None:
        """Gives back every segment without a block in use; of expandable segments, every unused unit."""
        for pools in (self._large, self._small):
            for pool in pools.values():
                if self._expandable is not None:
                    self._expandable.release(pool)
                else:
                    self._release(pool, [block for block in pool.blocks if block.whole])

    def reset_peaks(self) -> None:
        """Lets the peaks start again from what is in use now; `retries` goes on counting."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_requested_bytes = self.requested_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def segments(self) -> Iterator[list[Block]]:
        """The blocks of each segment in order of address; an expandable segment includes what is not mapped."""
        heads = self._segments.values() if self._expandable is None else self._expandable.heads()
        for head in heads:
            blocks = [head]
            while (following := blocks[-1].next) is not None:
                blocks.append(following)
            yield blocks

    def adopt_segment(self, address: int, *, small: bool, blocks: Sequence[tuple[int, int | None]]) -> list[Block]:
        """Takes over a segment as it was when a recording began; returns its blocks in order.

        Each of `blocks` is its size and the bytes requested, None when free.
        """
        pool = (self._small if small else self._large)[0]
        result: list[Block] = []
        for size, requested in blocks:
            previous = result[-1] if result else None
            block = Block(previous.address + previous.size if previous else address, size, pool, previous, None)
            if previous is not None:
                previous.next = block
            if requested is None:
                pool.insert(block)
            else:
                block.free = False
                block.requested = requested
                self.allocated_bytes += size
                self.requested_bytes += requested
            result.append(block)
        self._segments[address] = result[0]
        self._reserve(sum(size for size, _ in blocks))
        self.reset_peaks()
        return result

    def _search(self, pool: Pool, size: int) -> int:
        """The place in `pool` of the free block to take, or its length for none, under any configuration."""
        if self._collects:
            pool.family.searches += 1
        at = bisect_left(pool.keys, size << ADDRESS_BITS)
        if at == len(pool.keys):
            return at
        if self._expandable is not None:
            at = self._expandable.prefer(pool, at)
        oversize = self.config.max_split_size
        if oversize is None:
            return at
        found = pool.blocks[at].size
        spare = self.config.max_non_split_rounding or self.config.large_segment_size
        if found >= oversize and (size < oversize or found >= size + spare):
            return len(pool.keys)
        return at

    def _obtain(self, pool: Pool, size: int, nbytes: int) -> Block:
        segment = self.config.segment_size(size)
        if self._collects:  # a
            self._collect_garbage()
        block = self._grow(pool, size, segment)  # b
        if block is None and self._release_oversize(pool, size):  # c
            block = self._grow(pool, size, segment)
        if block is None:  # d
            self.retries += 1
            self.empty_cache()
            block = self._grow(pool, size, segment)
        if block is None:  # e
            limit = self.limit_bytes or 0
            raise AllocatorOutOfMemoryError(
                f"No room for {format_bytes(nbytes)}, which needs a segment of {format_bytes(segment)}: of "
                f"{format_bytes(limit)}, {format_bytes(self.reserved_bytes)} are reserved and "
                f"{format_bytes(self.allocated_bytes)} in use.",
                requested_bytes=nbytes,
                segment_bytes=segment,
                allocated_bytes=self.allocated_bytes,
                reserved_bytes=self.reserved_bytes,
                limit_bytes=limit,
            )
        return block

    def _grow(self, pool: Pool, size: int, segment: int) -> Block | None:
        """A block of at least `size` bytes in new memory; None when the limit forbids `segment` bytes more."""
        wanted = self.reserved_bytes + segment
        if self.limit_bytes is not None and wanted > self.limit_bytes:
            self.refused_bytes = wanted if self.refused_bytes is None else min(self.refused_bytes, wanted)
            return None
        self.granted_bytes = max(self.granted_bytes, wanted)
        if self._expandable is not None:
            return self._expandable.grow(pool, size)
        block = Block(self._place_segment(segment), segment, pool, None, None)
        self._segments[block.address] = block
        self._reserve(segment)
        return block

    def _place_segment(self, segment: int) -> int:
        """The address of a new segment; a replay of a recording puts it where the device did."""
        address = self._next_address
        self._next_address += segment
        return address

    def _reserve(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _release(self, pool: Pool, segments: Sequence[Block]) -> None:
        for block in segments:
            pool.remove(block)
            del self._segments[block.address]
            self.reserved_bytes -= block.size

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Gives back just enough oversize blocks: the smallest that will do, or several from the largest on."""
        oversize = self.config.max_split_size
        if oversize is None or self._expandable is not None:
            return False
        needed = max(oversize, size)
        at = bisect_left(pool.keys, needed << ADDRESS_BITS)
        if at < len(pool.keys):
            self._release(pool, [pool.blocks[at]])
            return True
        released = 0
        while released < needed and pool.blocks and pool.blocks[-1].size >= oversize:
            released += pool.blocks[-1].size
            self._release(pool, [pool.blocks[-1]])
        return released >= needed

    def _collect_garbage(self) -> None:
        """Gives back whole segments of the large pool that went unused longest, down to the threshold."""
        assert self.limit_bytes is not None  # what `_collects` says
        excess = self.reserved_bytes - int(self.config.garbage_collection_threshold * self.limit_bytes)
        now = self._large.searches
        while excess > 0:
            whole = [block for pool in self._large.values() for block in pool.blocks if block.whole]
            average = sum(now - block.inserted_at for block in whole) / max(len(whole), 1)
            old = [block for block in whole if now - block.inserted_at >= average]
            if not old or self._expandable is not None:
                return
            for block in old:
                self._release(block.pool, [block])
                excess -= block.size
