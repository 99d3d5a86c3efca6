"""The space as lines: candidates that differ only in how the batch is split, smallest micro-batch first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autofit.candidate import Candidate, Checkpointing, Precision

_SPLIT = ("micro_batch_size", "accumulation_steps")
_RIGID = tuple(name for name in Candidate.model_fields if name not in _SPLIT)
_NO_CHECKPOINTING = Checkpointing()
_PRECISIONS: tuple[Precision, ...] = ("bfloat16", "float16", "tf32", "float32")

Key = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Line:
    """Candidates alike in everything but the split, ordered by `sizes`; `steps[i]` is micro-steps per sample.

    Along a line memory grows with the micro-batch, and every micro-step that a larger one saves is saved overhead.
    """

    number: int
    candidates: tuple[Candidate, ...]
    sizes: tuple[int, ...]
    steps: tuple[float, ...]

    @property
    def recomputes(self) -> bool:
        """Whether the line pays for its memory with recomputation."""
        return self.candidates[0].checkpointing.mode != "none"

    @property
    def half_precision(self) -> bool:
        """Whether activations are kept in 16 bits."""
        return self.candidates[0].precision in ("bfloat16", "float16")


@dataclass(frozen=True)
class Position:
    """Where a candidate lies: the number of its line and its index there."""

    line: int
    index: int


class Space:
    """All candidates, each once, sorted into lines; the lines that are likely to be fastest come first."""

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        groups: dict[Key, dict[tuple[int, int], Candidate]] = {}
        for candidate in candidates:
            split = (candidate.micro_batch_size, -candidate.accumulation_steps)
            groups.setdefault(_key(candidate), {}).setdefault(split, candidate)
        samples = _common_batch(split for group in groups.values() for split in group)
        self._keys = sorted(groups, key=lambda key: _promise(next(iter(groups[key].values()))))
        self.lines = tuple(_line(number, groups[key], samples) for number, key in enumerate(self._keys))

    @cached_property
    def _positions(self) -> dict[tuple[Key, int, int], Position]:
        return {
            (key, candidate.micro_batch_size, candidate.accumulation_steps): Position(line.number, index)
            for key, line in zip(self._keys, self.lines, strict=True)
            for index, candidate in enumerate(line.candidates)
        }

    def find(self, candidate: Candidate) -> Position | None:
        """Where `candidate` lies, None when it is not in the space."""
        return self._positions.get((_key(candidate), candidate.micro_batch_size, candidate.accumulation_steps))

    @cached_property
    def twins(self) -> tuple[Line | None, ...]:
        """For each line that recomputes: the line that is the same without recomputation, if the space has it."""
        by_key = dict(zip(self._keys, self.lines, strict=True))
        return tuple(
            by_key.get(_key(line.candidates[0].model_copy(update={"checkpointing": _NO_CHECKPOINTING})))
            if line.recomputes
            else None
            for line in self.lines
        )


def _key(candidate: Candidate) -> Key:
    return tuple([getattr(candidate, name) for name in _RIGID])


def _promise(candidate: Candidate) -> tuple[bool, int]:
    """Sorts likely fast lines to the front: no recomputation, then tensor cores, the milder change first."""
    return candidate.checkpointing.mode != "none", _PRECISIONS.index(candidate.precision)


def _line(number: int, group: dict[tuple[int, int], Candidate], samples: int | None) -> Line:
    splits = sorted(group)
    return Line(
        number=number,
        candidates=tuple(group[split] for split in splits),
        sizes=tuple(size for size, _ in splits),
        steps=tuple(-steps / samples if samples else 1 / size for size, steps in splits),
    )


def _common_batch(splits: Iterable[tuple[int, int]]) -> int | None:
    """The samples per optimizer step that all splits share; None when there is no such number.

    A balanced split of n samples in a steps has ceil(n / a) as its largest part, so (m - 1)·a < n ≤ m·a.
    """
    lowest, highest = 1, None
    for size, negative_steps in splits:
        steps = -negative_steps
        lowest = max(lowest, (size - 1) * steps + 1)
        highest = size * steps if highest is None else min(highest, size * steps)
    return highest if highest is not None and lowest <= highest else None


def nearest(line: Line, free: Sequence[int], size: float) -> int:
    """The index of `free` (not empty) whose micro-batch is nearest to `size` in ratio."""
    return min(free, key=lambda index: max(line.sizes[index] / size, size / line.sizes[index]))
