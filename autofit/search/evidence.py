"""What the trials so far say about each line."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from autofit.candidate import Candidate
from autofit.plan import Trial
from autofit.search.lines import Line, Space

# A line on which this many candidates did not run, and none did, is given up: what is wrong is not the split.
STRIKES = 2
# Above this share of the cap the allocator may have to free and ask again, which takes time.
CROWDED_SHARE = 0.95


@dataclass
class LineEvidence:
    """Findings on one line, by index: peaks and seconds per sample of what fitted, bytes reached by what did not.

    `crowded` ran so near the cap that the time may be the allocator's; `broken` did not run, for another reason than
    memory; `taken` is not to be tried (again).
    """

    peaks: dict[int, int | None] = field(default_factory=dict)
    costs: dict[int, float] = field(default_factory=dict)
    crowded: set[int] = field(default_factory=set)
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


class Evidence:
    """Findings on all lines: `evidence[line]` is empty for a line on which nothing was tried."""

    def __init__(
        self,
        space: Space,
        tried: Iterable[tuple[Candidate, Trial]],
        *,
        cap_bytes: int | None = None,
        taken: Collection[Candidate] = (),
    ) -> None:
        """Sorts what was `tried` into the lines of `space`; `taken` candidates are in other hands and say nothing."""
        self._space = space
        self._lines: dict[int, LineEvidence] = {}
        for candidate in taken:
            if position := space.find(candidate):
                self._lines.setdefault(position.line, LineEvidence()).taken.add(position.index)
        for candidate, trial in tried:
            if position := space.find(candidate):
                own = self._lines.setdefault(position.line, LineEvidence())
                _note(own, position.index, trial, cap_bytes=cap_bytes)

    def __getitem__(self, line: Line) -> LineEvidence:
        return self._lines.get(line.number) or LineEvidence()

    def touched(self) -> Iterator[tuple[Line, LineEvidence]]:
        """The lines on which something was tried, in the order of the space."""
        for number in sorted(self._lines):
            yield self._space.lines[number], self._lines[number]

    @property
    def best_cost(self) -> float | None:
        """Seconds per sample of the fastest candidate; None when nothing ran."""
        return min((cost for own in self._lines.values() for cost in own.costs.values()), default=None)

    @property
    def nothing_ran(self) -> bool:
        """Whether no candidate was run yet, successfully or not."""
        return not any(own.peaks or own.failed or own.broken for own in self._lines.values())


def _note(own: LineEvidence, index: int, trial: Trial, *, cap_bytes: int | None) -> None:
    own.taken.add(index)
    peak = trial.peak_reserved_bytes
    if not trial.was_run:
        return
    if trial.outcome in ("out_of_memory", "over_budget"):
        own.failed[index] = peak
    elif trial.outcome == "slower" and not trial.samples_per_second:
        own.peaks[index] = peak
    elif trial.outcome in ("feasible", "slower") and trial.samples_per_second:
        own.peaks[index] = peak
        own.costs[index] = 1 / trial.samples_per_second
        if trial.alloc_retries or (cap_bytes and peak and peak > CROWDED_SHARE * cap_bytes):
            own.crowded.add(index)
    else:
        own.broken.add(index)
