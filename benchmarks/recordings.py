"""Recordings of the CUDA caching allocator on real GPUs, and how the allocator model is held against them.

A recording is a JSON file, plain or gzipped, with the segments at its beginning (`initial_segments`), the `events` in
order, and the bytes reserved at its end (`final_reserved_bytes`). The model is told only the requests and the frees,
and where new segments were placed; it has to come up with everything else.
"""

from __future__ import annotations

import gzip
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.memory.allocator import CachingAllocator
from autofit.memory.pool import Block
from autofit.memory.replay import Event

Segment = tuple[int, int]  # address, bytes


@dataclass(frozen=True)
class Recording:
    """One file: its name without suffixes, and its content as it was read."""

    name: str
    initial_segments: list[dict[str, Any]]
    events: list[tuple[Any, ...]]
    final_reserved_bytes: int

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Reads a `.json` or `.json.gz` file."""
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        return cls(
            name=path.name.removesuffix(".gz").removesuffix(".json"),
            initial_segments=content["initial_segments"],
            events=[tuple(event) for event in content["events"]],
            final_reserved_bytes=content["final_reserved_bytes"],
        )

    def births_and_deaths(self) -> list[Event]:
        """The recording without its addresses, for a replay; what was alive at its beginning is left out."""
        alive: dict[int, int] = {}
        result: list[Event] = []
        for action, address, *nbytes in self.events:
            if action == "alloc":
                alive[address] = len(result)
                result.append((len(result), nbytes[0]))
            elif action == "free" and address in alive:
                result.append((alive.pop(address), 0))
        return result


@dataclass(frozen=True)
class Comparison:
    """How far the model and the device agree on one recording."""

    name: str
    allocations: int
    address_mismatches: int
    segment_mismatches: int
    reserved_exact: bool

    @property
    def exact(self) -> bool:
        """Whether every address, every segment and the final reserved bytes agree."""
        return not self.address_mismatches and not self.segment_mismatches and self.reserved_exact

    def __str__(self) -> str:
        return (
            f"{self.name} allocations={self.allocations} address_mismatches={self.address_mismatches} "
            f"segment_mismatches={self.segment_mismatches} reserved_exact={str(self.reserved_exact).lower()}"
        )


class _PlacedAllocator(CachingAllocator):
    """Places segments where the recording has them, and counts those that the recording did not ask for just then."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: deque[Segment] = deque()
        self.mismatches = 0

    def _place_segment(self, segment: int) -> int:
        if not self.recorded:
            self.mismatches += 1
            # Far above what was recorded, so that the replay can go on.
            return (1 << 46) + super()._place_segment(segment)
        address, nbytes = self.recorded.popleft()
        self.mismatches += nbytes != segment
        return address


class _Replay:
    """One comparison under way."""

    def __init__(self, recording: Recording) -> None:
        self.allocator = _PlacedAllocator()
        self.live: dict[int, Block] = {}
        self.allocations = self.address_mismatches = self.segment_mismatches = 0
        for segment in recording.initial_segments:
            blocks = [(size, requested) for _, size, requested in segment["blocks"]]
            adopted = self.allocator.adopt_segment(segment["address"], small=segment["pool"] == "small", blocks=blocks)
            self.live.update((block.address, block) for block in adopted if not block.free)

    def alloc(self, address: int, nbytes: int) -> None:
        block = self.allocator.malloc(nbytes)
        self.allocations += 1
        self.address_mismatches += block.address != address
        self.segment_mismatches += len(self.allocator.recorded)  # the device needed them, the model did not
        self.allocator.recorded.clear()
        self.live[address] = block

    def free(self, address: int) -> None:
        self.allocator.free(self.live.pop(address))

    def segments_freed(self, recorded: Sequence[Segment]) -> None:
        """Whatever made the device give segments back, it gives back all that are unused."""
        before = self._segments()
        self.allocator.empty_cache()
        self.segment_mismatches += len(before - self._segments() ^ set(recorded))

    def _segments(self) -> set[Segment]:
        return {(blocks[0].address, sum(block.size for block in blocks)) for blocks in self.allocator.segments()}


def compare(recording: Recording) -> Comparison:
    """Replays `recording` through the allocator model and counts where they differ."""
    replay = _Replay(recording)
    freed: list[Segment] = []
    for action, address, *nbytes in recording.events:
        if action == "segment_free":
            freed.append((address, nbytes[0]))
            continue
        if freed:
            replay.segments_freed(freed)
            freed = []
        if action == "segment_alloc":
            replay.allocator.recorded.append((address, nbytes[0]))
        elif action == "alloc":
            replay.alloc(address, nbytes[0])
        else:
            replay.free(address)
    if freed:
        replay.segments_freed(freed)
    return Comparison(
        name=recording.name,
        allocations=replay.allocations,
        address_mismatches=replay.address_mismatches,
        segment_mismatches=replay.segment_mismatches + replay.allocator.mismatches,
        reserved_exact=replay.allocator.reserved_bytes == recording.final_reserved_bytes,
    )
