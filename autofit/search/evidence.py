"""What the trials so far say about each line."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from autofit.candidate import Candidate
from autofit.plan import Trial
from autofit.search.lines import Space

# A line on which this many candidates did not run, and none did, is given up: what is wrong is not the split.
STRIKES = 2


@dataclass
class LineEvidence:
    """Findings on one line, by index: peaks of what fitted, seconds per sample, bytes reached by what did not fit."""

    peaks: dict[int, int | None] = field(default_factory=dict)
    costs: dict[int, float] = field(default_factory=dict)
    failed: dict[int, int | None] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)
    taken: set[int] = field(default_factory=set)

    @property
    def largest_fit(self) -> int:
        """The largest index that is known to fit; -1 when none is."""
        return max(self.peaks, default=-1)

    @property
    def smallest_failure(self) -> int | None:
        """The smallest index that did not fit, above all that did.

        One below them contradicts that memory grows with the micro-batch: it rules out itself and nothing else.
        """
        return min((index for index in self.failed if index > self.largest_fit), default=None)

    @property
    def given_up(self) -> bool:
        """Whether nothing runs on this line for reasons other than memory."""
        return len(self.broken) >= STRIKES and not self.costs


@dataclass
class Evidence:
    """Findings on all lines."""

    lines: tuple[LineEvidence, ...]

    @classmethod
    def of(
        cls, space: Space, tried: Iterable[tuple[Candidate, Trial]], *, taken: Collection[Candidate] = ()
    ) -> Evidence:
        """Sorts what was `tried` into the lines of `space`; `taken` candidates are in other hands and say nothing."""
        evidence = cls(tuple(LineEvidence() for _ in space.lines))
        for candidate in taken:
            position = space.find(candidate)
            if position:
                evidence.lines[position.line].taken.add(position.index)
        for candidate, trial in tried:
            position = space.find(candidate)
            if position:
                _note(evidence.lines[position.line], position.index, trial)
        return evidence

    @property
    def best_cost(self) -> float | None:
        """Seconds per sample of the fastest candidate; None when nothing ran."""
        return min((cost for line in self.lines for cost in line.costs.values()), default=None)

    @property
    def nothing_tried(self) -> bool:
        """Whether no candidate has been run yet."""
        return not any(line.peaks or line.failed or line.broken for line in self.lines)


def was_run(trial: Trial) -> bool:
    """Whether the trial was run, and not only recorded as predicted not to fit."""
    predicted_only = trial.outcome == "over_budget" and trial.peak_reserved_bytes is None
    return not predicted_only and trial.outcome not in ("predicted", "not_run")


def _note(line: LineEvidence, index: int, trial: Trial) -> None:
    line.taken.add(index)
    if not was_run(trial):
        return
    if trial.outcome in ("out_of_memory", "over_budget"):
        line.failed[index] = trial.peak_reserved_bytes
    elif trial.feasible and trial.samples_per_second:
        line.peaks[index] = trial.peak_reserved_bytes
        line.costs[index] = 1 / trial.samples_per_second
    elif trial.outcome == "slower":
        line.peaks[index] = trial.peak_reserved_bytes
    else:
        line.broken.add(index)
