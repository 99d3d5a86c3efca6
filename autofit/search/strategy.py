"""Which candidate to try next: of those that should fit, the one that could beat the best by most."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

from autofit.candidate import Candidate
from autofit.search.evidence import Evidence
from autofit.search.fit import Fit
from autofit.search.lines import Line, Space
from autofit.search.speed import Speed, is_tidy

# A candidate that cannot plausibly beat the best by this share is not worth a trial.
WORTHWHILE_GAIN = 0.01
# A candidate that did not run, for another reason than memory, is followed by one that is this many times smaller.
RETREAT_FACTOR = 8
# How much smaller a micro-batch has to be than one that ran near the limit, to be out of its troubles.
ROOM_SHARE = 0.1


class Strategy:
    """Chooses from the evidence alone, so the same trials always lead to the same next one."""

    def __init__(self, space: Space, fit: Fit) -> None:
        self._space = space
        self._fit = fit

    def propose(self, evidence: Evidence) -> Candidate | None:
        """The next candidate, None when no untried one is worth it."""
        speed = Speed(self._space, evidence)
        proposals = [(speed.floor(line, index), line, index) for line, index in self._promising(evidence)]
        if not proposals:
            # Nothing is predicted to fit. Only a trial shows that it really does not.
            return self._fit.least_needed() if evidence.nothing_ran else None
        floor, line, index = min(proposals, key=lambda proposal: proposal[0])
        best = evidence.best_cost
        return line.candidates[index] if best is None or floor < best * (1 - WORTHWHILE_GAIN) else None

    def _promising(self, evidence: Evidence) -> Iterator[tuple[Line, int]]:
        """From every line that was touched, and from the first untouched one of each kind that has anything to try."""
        touched = [line for line, _ in evidence.touched()]
        for line in touched:
            yield from ((line, index) for index in self._representatives(line, evidence))
        for kind in self._space.kinds:
            for line in kind:
                found = [] if line in touched else [(line, index) for index in self._representatives(line, evidence)]
                yield from found
                if found:
                    break

    def _representatives(self, line: Line, evidence: Evidence) -> Iterator[int]:
        """The untried candidates that stand for their neighbourhoods.

        The largest that fits, the middles of the gaps between measured ones, tidy sizes beside them, and those a
        little below one that ran near the limit.
        """
        own = evidence[line]
        limit = self._fit.limit(line, evidence)
        lowest = self._lowest(line, evidence)
        if own.broken and not own.costs:
            limit = min(limit, _far_below(line, min(own.broken)))
        known = [index for index in sorted(own.costs) if lowest <= index <= limit]
        top = next((i for i in range(limit, lowest - 1, -1) if i not in own.taken), None)
        if top is not None and (not known or top > known[-1]):
            yield top
        if not known:
            return
        for left, right in pairwise([lowest - 1, *known]):
            yield from _middle(line, left, right, own.taken)
        yield from _tidy_neighbours(line, known, range(lowest, limit + 1), own.taken)
        for index in own.crowded:
            yield from _with_room(line, index, lowest, own.taken)

    def _lowest(self, line: Line, evidence: Evidence) -> int:
        """The first index worth trying: a line that recomputes is of use only where its twin does not fit."""
        twin = self._space.twins[line.number]
        limit = self._fit.limit(twin, evidence) if twin else -1
        return bisect_right(line.sizes, twin.sizes[limit]) if twin and limit >= 0 else 0


def _middle(line: Line, left: int, right: int, taken: set[int]) -> Iterator[int]:
    """The untried index strictly between two that is nearest to their middle, in ratio of the micro-batches."""
    wanted = math.sqrt(line.sizes[max(left, 0)] * line.sizes[right])
    start = min(max(bisect_right(line.sizes, wanted), left + 1), right - 1)
    for offset in range(right - left):
        near = [i for i in (start - offset, start + offset) if left < i < right and i not in taken]
        if near:
            yield min(near, key=lambda i: abs(math.log(line.sizes[i] / wanted)))
            return


def _tidy_neighbours(line: Line, known: Sequence[int], allowed: range, taken: set[int]) -> Iterator[int]:
    """The untried tidy micro-batches next to the known ones, on either side."""
    for index in known:
        for side in (range(index - 1, allowed.start - 1, -1), range(index + 1, allowed.stop)):
            tidy = next((i for i in side if is_tidy(line.sizes[i])), None)
            if tidy is not None and tidy not in taken:
                yield tidy


def _far_below(line: Line, index: int) -> int:
    """Where to go from a split that did not run: far down at once, since what is wrong may be the size."""
    return max(0, bisect_right(line.sizes, line.sizes[index] / RETREAT_FACTOR) - 1)


def _with_room(line: Line, crowded: int, lowest: int, taken: set[int]) -> Iterator[int]:
    """The untried index whose micro-batch leaves some room where that at `crowded` left none."""
    index = bisect_right(line.sizes, line.sizes[crowded] * (1 - ROOM_SHARE)) - 1
    if index >= lowest and index not in taken:
        yield index
