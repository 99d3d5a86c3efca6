"""How far up each line memory reaches: what was measured, then what is predicted, then what peaks let expect."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from autofit.candidate import Candidate
from autofit.search.evidence import Evidence
from autofit.search.lines import Line, Space
from autofit.search.peaks import reach
from autofit.search.prediction import Predict, Predictions


class Fit:
    """Beliefs about what fits under `cap_bytes`; what was measured always overrules what was predicted."""

    def __init__(self, space: Space, *, cap_bytes: int | None, predict: Predict | None) -> None:
        self._space = space
        self._cap = cap_bytes
        self._predictions = (
            None if cap_bytes is None or predict is None else Predictions(space, cap_bytes=cap_bytes, predict=predict)
        )

    def limit(self, line: Line, evidence: Evidence) -> int:
        """The largest index of `line` that is believed to fit; -1 when none is.

        It lies below every split that ran out, however that was, and not below one that fitted.
        """
        own = evidence[line]
        if own.given_up:
            return -1
        low, high = _end_of_size(line, own.largest_fit), len(line.sizes) - 1
        if own.smallest_failure is not None:
            high = bisect_left(line.sizes, line.sizes[own.smallest_failure]) - 1
        believed = self._predictions.limit(line, evidence, low=low, high=high) if self._predictions else None
        if believed is None:
            believed = bisect_right(line.sizes, reach(line, evidence, cap_bytes=self._cap)) - 1
        return max(low, min(believed, high))

    def least_needed(self) -> Candidate | None:
        """The candidate with the smallest prediction of all; None when nothing is predicted."""
        if self._predictions is None:
            return None
        needs = [
            (raw, line.number) for line in self._space.lines if (raw := self._predictions.raw(line, 0)) is not None
        ]
        return self._space.lines[min(needs)[1]].candidates[0] if needs else None

    def first_beyond(self, evidence: Evidence) -> Iterator[tuple[Candidate, int]]:
        """Of each line that was looked at: the smallest split predicted not to fit, and the bytes that it needs.

        Only where no trial shows the limit already.
        """
        for line in self._predictions.asked() if self._predictions else ():
            own = evidence[line]
            index = self.limit(line, evidence) + 1
            if index == len(line.sizes) or index in own.taken or own.given_up or own.smallest_failure is not None:
                continue
            assert self._predictions is not None
            needed = self._predictions.corrected(line, index, evidence)
            if needed is not None:
                yield line.candidates[index], needed


def _end_of_size(line: Line, index: int) -> int:
    """The last index of the micro-batch size at `index`, which needs as much memory; -1 for -1."""
    return bisect_right(line.sizes, line.sizes[index]) - 1 if index >= 0 else -1
