"""The space as lines: candidates that differ only in how the batch is split, smallest micro-batch first."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autofit.candidate import Candidate, Checkpointing, Precision

_SPLIT = ("micro_batch_size", "accumulation_steps")
_RIGID = tuple(name for name in Candidate.model_fields if name not in _SPLIT)
_NO_CHECKPOINTING = Checkpointing()
_PRECISIONS: tuple[Precision, ...] = ("bfloat16", "float16", "tf32", "float32")

Key = tuple[Any, ...]
Split = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Line:
    """Candidates alike in everything but the split, ordered by `sizes`; `steps[i]` is micro-steps per sample.

    Along a line memory grows with the micro-batch, and every micro-step that a larger one saves is saved overhead.
    """

    number: int
    candidates: tuple[Candidate, ...]
    splits: tuple[Split, ...]
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
        groups: dict[Key, dict[Split, Candidate]] = {}
        for candidate in candidates:
            groups.setdefault(_key(candidate), {}).setdefault(_split(candidate), candidate)
        samples = _common_batch(split for group in groups.values() for split in group)
        keys = sorted(groups, key=lambda key: _promise(next(iter(groups[key].values()))))
        self._numbers = {key: number for number, key in enumerate(keys)}
        self.lines = tuple(_line(number, groups[key], samples) for key, number in self._numbers.items())

    def find(self, candidate: Candidate) -> Position | None:
        """Where `candidate` lies, None when it is not in the space."""
        number = self._numbers.get(_key(candidate))
        if number is None:
            return None
        index = bisect_left(self.lines[number].splits, _split(candidate))
        found = index < len(self.lines[number].splits) and self.lines[number].splits[index] == _split(candidate)
        return Position(number, index) if found else None

    @cached_property
    def kinds(self) -> tuple[tuple[Line, ...], ...]:
        """The lines by precision and whether they recompute: alike in speed as long as nothing else is known."""
        kinds: dict[Key, list[Line]] = {}
        for line in self.lines:
            kinds.setdefault((line.candidates[0].precision, line.recomputes), []).append(line)
        return tuple(tuple(lines) for lines in kinds.values())

    @cached_property
    def twins(self) -> tuple[Line | None, ...]:
        """For each line that recomputes: the line that is the same without recomputation, if the space has it."""
        plain = [line.candidates[0].model_copy(update={"checkpointing": _NO_CHECKPOINTING}) for line in self.lines]
        numbers = [self._numbers.get(_key(candidate)) for candidate in plain]
        return tuple(
            self.lines[number] if number is not None and number != line.number else None
            for line, number in zip(self.lines, numbers, strict=True)
        )


def _key(candidate: Candidate) -> Key:
    return tuple([getattr(candidate, name) for name in _RIGID])


def _split(candidate: Candidate) -> Split:
    """(micro-batch, minus the steps): sorts by memory, and of equal memory the one with the fewest steps last."""
    return candidate.micro_batch_size, -candidate.accumulation_steps


def _promise(candidate: Candidate) -> tuple[int, int]:
    """Sorts likely fast lines to the front: no recomputation, then tensor cores, the milder change first.

    Activations in host memory come last.
    """
    mode = candidate.checkpointing.mode
    return ("none", mode, "offload").index(mode), _PRECISIONS.index(candidate.precision)


def _line(number: int, group: dict[Split, Candidate], samples: int | None) -> Line:
    splits = tuple(sorted(group))
    return Line(
        number=number,
        candidates=tuple(group[split] for split in splits),
        splits=splits,
        sizes=tuple(size for size, _ in splits),
        steps=tuple(-negative_steps / samples if samples else 1 / size for size, negative_steps in splits),
    )


def _common_batch(splits: Iterable[Split]) -> int | None:
    """The samples per optimizer step that all splits share; None when there is no such number.

    A balanced split of n samples in a steps has ceil(n / a) as its largest part, so (m - 1)·a < n ≤ m·a.
    """
    lowest, highest = 1, None
    for size, negative_steps in splits:
        steps = -negative_steps
        lowest = max(lowest, (size - 1) * steps + 1)
        highest = size * steps if highest is None else min(highest, size * steps)
    return highest if highest is not None and lowest <= highest else None
