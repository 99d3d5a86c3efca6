"""Expandable segments: address space to which memory is mapped unit by unit. Not validated on a GPU.

Source: `ExpandableSegment` and `try_allocate_expandable_block` in `c10/cuda/CUDACachingAllocator.cpp`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import pairwise
from operator import attrgetter

from autofit.memory.config import SMALL_SEGMENT
from autofit.memory.pool import Block, Pool

# The real allocator takes 1⅛ of the device's memory for each segment; more than any device has behaves the same.
ADDRESS_SPACE = 1 << 40

_address = attrgetter("address")


class Unmapped(Block):
    """Address space without memory. It does not count as free: no search finds it and nothing merges with it."""

    __slots__ = ()

    def __init__(self, address: int, size: int, pool: Pool, previous: Block | None, following: Block | None) -> None:
        super().__init__(address, size, pool, previous, following)
        self.free = False


class ExpandableSegments:
    """The expandable segments of all pools of one allocator, which passes `reserve` to count what is mapped."""

    def __init__(self, reserve: Callable[[int], None], *, large_unit: int) -> None:
        self._reserve = reserve
        self._large_unit = large_unit
        self._unmapped: dict[Pool, list[Unmapped]] = {}  # in order of address
        self._ends: list[Unmapped] = []  # the last piece of each segment, which is never mapped whole

    def heads(self) -> Iterator[Block]:
        """The first block of each segment."""
        for end in self._ends:
            block: Block = end
            while block.previous is not None:
                block = block.previous
            yield block

    def prefer(self, pool: Pool, at: int) -> int:
        """Best fit by the size that a block can grow to: from place `at` on, while the next block can grow to less."""
        blocks = pool.blocks
        while at + 1 < len(blocks) and _room(blocks[at + 1]) < _room(blocks[at]):
            at += 1
        return at

    def grow(self, pool: Pool, size: int) -> Block:
        """A block of at least `size` bytes, taken out of the free set, after mapping no more than is missing."""
        block = self._start(pool, size)
        if isinstance(block, Unmapped):
            block = self._map(block, min(block.size, size))
        while block.size < size:
            unmapped = block.next
            assert isinstance(unmapped, Unmapped)  # `_start` saw room for `size` bytes
            block = self._map(unmapped, min(unmapped.size, size - block.size))
        pool.remove(block)
        return block

    def release(self, pool: Pool) -> None:
        """Unmaps every unit that lies wholly inside a free block."""
        for block in list(pool.blocks):
            self._unmap(block)

    def _unit(self, pool: Pool) -> int:
        return SMALL_SEGMENT if pool.family.small else self._large_unit

    def _start(self, pool: Pool, size: int) -> Block:
        """The first block, free or unmapped, from which neighbours without a user hold `size` bytes."""
        holes = self._unmapped.setdefault(pool, [])
        for hole in holes:
            start = hole.previous if hole.previous is not None and hole.previous.free else hole
            block: Block | None = start
            room = 0
            while room < size and block is not None and (block.free or isinstance(block, Unmapped)):
                room += block.size
                block = block.next
            if room >= size:
                return start
        end = Unmapped(len(self._ends) * ADDRESS_SPACE, ADDRESS_SPACE, pool, None, None)
        self._ends.append(end)
        holes.append(end)
        return end

    def _map(self, hole: Unmapped, nbytes: int) -> Block:
        """Maps the first `nbytes` of `hole`, in whole units; returns the free block that they become part of."""
        pool = hole.pool
        unit = self._unit(pool)
        mapped = -(-nbytes // unit) * unit
        block = Block(hole.address, mapped, pool, hole.previous, hole)
        if hole.previous is not None:
            hole.previous.next = block
        hole.previous = block
        hole.address += mapped
        hole.size -= mapped
        if hole.size == 0:
            block.next = hole.next
            if hole.next is not None:
                hole.next.previous = block
            self._unmapped[pool].remove(hole)
        self._reserve(mapped)
        return pool.put(block)

    def _unmap(self, block: Block) -> None:
        pool = block.pool
        unit = self._unit(pool)
        base = block.address // ADDRESS_SPACE * ADDRESS_SPACE
        first = base - (base - block.address) // unit * unit
        last = base + (block.address + block.size - base) // unit * unit
        if first >= last:
            return
        pool.remove(block)
        self._reserve(first - last)
        pieces = (
            Block(block.address, first - block.address, pool, None, None),
            Unmapped(first, last - first, pool, None, None),
            Block(last, block.address + block.size - last, pool, None, None),
        )
        present = [piece for piece in pieces if piece.size]
        _link(block.previous, *present, block.next)
        for piece in present:
            if isinstance(piece, Unmapped):
                self._add_hole(piece)
            else:
                pool.insert(piece)

    def _add_hole(self, hole: Unmapped) -> None:
        """Takes in new unmapped space; what lies before and after it and is unmapped too becomes one with it."""
        holes = self._unmapped[hole.pool]
        insort(holes, hole, key=_address)
        for lower, upper in ((hole.previous, hole), (hole, hole.next)):
            if isinstance(lower, Unmapped) and isinstance(upper, Unmapped):
                # The upper one stays: it may be the end of the segment.
                del holes[bisect_left(holes, lower.address, key=_address)]
                upper.address = lower.address
                upper.size += lower.size
                _link(lower.previous, upper)


def _room(block: Block) -> int:
    return block.size + (block.next.size if isinstance(block.next, Unmapped) else 0)


def _link(*chain: Block | None) -> None:
    for lower, upper in pairwise(chain):
        if lower is not None:
            lower.next = upper
        if upper is not None:
            upper.previous = lower
