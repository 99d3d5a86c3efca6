"""Blocks, and the sets of free blocks that the caching allocator searches."""

from __future__ import annotations

from bisect import bisect_left
from sys import maxsize

from autofit.memory.config import MIN_BLOCK, SMALL_MAX, AllocatorConfig

# A free block's place in the order of best fit is one integer, size then address: it compares faster than a pair.
ADDRESS_BITS = 48


class Block:
    """A piece of a segment, in use or free: `size` is what it holds, `requested` what was asked for, both in bytes."""

    __slots__ = ("address", "free", "inserted_at", "next", "pool", "previous", "requested", "size")

    requested: int
    inserted_at: int

    def __init__(self, address: int, size: int, pool: Pool, previous: Block | None, following: Block | None) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.previous = previous
        self.next = following
        self.free = True

    def __repr__(self) -> str:
        return f"Block at {self.address:#x}, {self.size} bytes, {'free' if self.free else 'in use'}"

    @property
    def whole(self) -> bool:
        """Whether the block is all of its segment."""
        return self.previous is None and self.next is None


class Pool:
    """The free blocks of one stream and one size class, in the order of best fit: size, then address."""

    __slots__ = ("blocks", "family", "keys", "split_below", "split_from")

    def __init__(self, family: Pools, *, split_from: int, split_below: int) -> None:
        self.family = family
        self.split_from = split_from
        self.split_below = split_below
        self.keys: list[int] = []
        self.blocks: list[Block] = []

    def insert(self, block: Block) -> None:
        """Adds a free block that has no free neighbour."""
        keys = self.keys
        key = block.size << ADDRESS_BITS | block.address
        at = bisect_left(keys, key)
        keys.insert(at, key)
        self.blocks.insert(at, block)

    def remove(self, block: Block) -> None:
        """Takes a free block out, whatever becomes of it."""
        at = bisect_left(self.keys, block.size << ADDRESS_BITS | block.address)
        del self.keys[at]
        del self.blocks[at]

    def put(self, block: Block) -> Block:
        """Adds a block that is no longer in use, merged with its free neighbours; returns the block that it is now."""
        keys = self.keys
        blocks = self.blocks
        block.free = True
        following = block.next
        previous = block.previous
        if previous is not None and previous.free:
            at = bisect_left(keys, previous.size << ADDRESS_BITS | previous.address)
            del keys[at]
            del blocks[at]
            previous.size += block.size
            previous.next = following
            if following is not None:
                following.previous = previous
            block = previous
        if following is not None and following.free:
            at = bisect_left(keys, following.size << ADDRESS_BITS | following.address)
            del keys[at]
            del blocks[at]
            block.size += following.size
            block.next = following = following.next
            if following is not None:
                following.previous = block
        key = block.size << ADDRESS_BITS | block.address
        at = bisect_left(keys, key)
        keys.insert(at, key)
        blocks.insert(at, block)
        return block


class AgingPool(Pool):
    """A pool whose blocks remember when they became free, which garbage collection asks."""

    __slots__ = ()

    def insert(self, block: Block) -> None:
        super().insert(block)
        block.inserted_at = self.family.searches

    def put(self, block: Block) -> Block:
        block = super().put(block)
        block.inserted_at = self.family.searches
        return block


class Pools(dict[int, Pool]):
    """The pools of one size class by stream, made when first used; `searches` counts over all of them."""

    def __init__(self, *, small: bool, config: AllocatorConfig) -> None:
        super().__init__()
        self.small = small
        self.searches = 0
        self._kind = AgingPool if config.garbage_collection_threshold else Pool
        fine = small or config.expandable_segments
        self._split_from = MIN_BLOCK if fine else SMALL_MAX + MIN_BLOCK  # more than 1 MiB, in multiples of 512 B
        self._split_below = maxsize if fine or config.max_split_size is None else config.max_split_size

    def __missing__(self, stream: int) -> Pool:
        pool = self[stream] = self._kind(self, split_from=self._split_from, split_below=self._split_below)
        return pool
