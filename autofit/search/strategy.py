"""Which candidate to try next: of those that should fit, the one that could beat the best by most."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise

from autofit.candidate import Candidate
from autofit.search.evidence import Evidence
from autofit.search.fit import Fit
from autofit.search.lines import Line, Space
from autofit.search.speed import Speed

# A candidate that cannot plausibly beat the best by this share is not worth a trial.
WORTHWHILE_GAIN = 0.01


class Strategy:
    """Chooses from the evidence alone, so the same trials always lead to the same next one."""

    def __init__(self, space: Space, fit: Fit) -> None:
        self._space = space
        self._fit = fit

    def propose(self, evidence: Evidence) -> Candidate | None:
        """The next candidate, None when no untried one is worth it."""
        limits = [self._fit.limit(line, evidence) for line in self._space.lines]
        speed = Speed(self._space, evidence)
        best: tuple[float, Candidate] | None = None
        for line in self._space.lines:
            for index in self._promising(line, evidence, limits):
                floor = speed.floor(line, index)
                if best is None or floor < best[0]:
                    best = floor, line.candidates[index]
        if best is None:
            return self._last_resort(evidence)
        worthwhile = evidence.best_cost is None or best[0] < evidence.best_cost * (1 - WORTHWHILE_GAIN)
        return best[1] if worthwhile else None

    def unfit(self, evidence: Evidence) -> Iterator[tuple[Candidate, int]]:
        """For each line, the smallest split predicted not to fit and its bytes, unless a trial shows the limit."""
        for line in self._space.lines:
            own = evidence.lines[line.number]
            index = self._fit.limit(line, evidence) + 1
            if index >= len(line.sizes) or index in own.taken or own.given_up:
                continue
            needed = self._fit.corrected(line, index, evidence)
            if needed is not None and own.smallest_failure is None:
                yield line.candidates[index], needed

    def _promising(self, line: Line, evidence: Evidence, limits: list[int]) -> Iterator[int]:
        """The untried candidates that stand for their neighbourhoods: the largest that fits, and the middles of gaps.

        A line that recomputes is of use only where its twin does not fit: there it recomputes for nothing.
        """
        own = evidence.lines[line.number]
        twin = self._space.twins[line.number]
        lowest = 0
        if twin and limits[twin.number] >= 0:
            lowest = bisect_right(line.sizes, twin.sizes[limits[twin.number]])
        known = [index for index in sorted(own.costs) if lowest <= index <= limits[line.number]]
        top = next((i for i in range(limits[line.number], lowest - 1, -1) if i not in own.taken), None)
        if top is not None and (not known or top > known[-1]):
            yield top
        if not known:
            return
        if lowest < known[0]:
            yield from _middle(line, lowest - 1, known[0], own.taken, wanted=_between(line, lowest, known[0]))
        for left, right in pairwise(known):
            yield from _middle(line, left, right, own.taken, wanted=_between(line, left, right))

    def _last_resort(self, evidence: Evidence) -> Candidate | None:
        """When nothing is predicted to fit: the least of all, since only a trial shows that it really does not."""
        if not evidence.nothing_tried:
            return None
        needs = [
            (needed, line.number)
            for line in self._space.lines
            if 0 not in evidence.lines[line.number].taken and (needed := self._fit.predicted(line, 0)) is not None
        ]
        return self._space.lines[min(needs)[1]].candidates[0] if needs else None


def _between(line: Line, left: int, right: int) -> float:
    return math.sqrt(line.sizes[left] * line.sizes[right])


def _middle(line: Line, left: int, right: int, taken: set[int], *, wanted: float) -> Iterator[int]:
    """The untried index strictly between `left` and `right` whose micro-batch is nearest in ratio to `wanted`."""
    start = min(max(bisect_right(line.sizes, wanted), left + 1), right - 1)
    for offset in range(right - left):
        near = [i for i in (start - offset, start + offset) if left < i < right and i not in taken]
        if near:
            yield min(near, key=lambda i: abs(math.log(line.sizes[i] / wanted)))
            return
