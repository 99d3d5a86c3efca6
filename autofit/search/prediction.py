"""What a predictor says about what fits, and how far trials have shown it to be off."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from autofit.candidate import Candidate
from autofit.search.evidence import Evidence, LineEvidence
from autofit.search.lines import Line, Space

Predict = Callable[[Candidate], int | None]

# After the n-th prediction that ran out on a line, this share · 3^(n-1) is added to what failures prove.
PUSH = 0.03


class Predictions:
    """Predicted bytes, each asked for once, with a factor per line that agrees with what was measured there."""

    def __init__(self, space: Space, *, cap_bytes: int, predict: Predict) -> None:
        self._space = space
        self._cap = cap_bytes
        self._predict = predict
        self._bytes: dict[tuple[int, int], int | None] = {}

    def asked(self) -> Iterator[Line]:
        """The lines of which anything was asked."""
        for number in sorted({number for number, _ in self._bytes}):
            yield self._space.lines[number]

    def raw(self, line: Line, index: int) -> int | None:
        """The predictor's own answer; None when it does not know."""
        if (line.number, index) not in self._bytes:
            self._bytes[line.number, index] = self._predict(line.candidates[index])
        return self._bytes[line.number, index]

    def corrected(self, line: Line, index: int, evidence: Evidence) -> int | None:
        """The prediction after what the trials taught about predictions."""
        raw = self.raw(line, index)
        return None if raw is None else math.ceil(raw * self._factor(line, evidence))

    def limit(self, line: Line, evidence: Evidence, *, low: int, high: int) -> int | None:
        """The largest index up to `high` that is predicted to fit, `low` being known to; None if a prediction misses.

        By bisection, since memory grows along a line.
        """
        found = self._bisect(line, self._factor(line, evidence), low=low, high=high)
        return 0 if found == -1 and self._may_fit_yet(line, evidence) else found

    def _bisect(self, line: Line, factor: float, *, low: int, high: int) -> int | None:
        while low < high:
            middle = (low + high + 1) // 2
            raw = self.raw(line, middle)
            if raw is None:
                return None
            if raw * factor <= self._cap:
                low = middle
            else:
                high = middle - 1
        return low

    def _may_fit_yet(self, line: Line, evidence: Evidence) -> bool:
        """Whether the smallest split, on a line that had failures, would fit as far as these prove anything."""
        failed, raw = evidence[line].failed, self.raw(line, 0)
        proven, _ = self._bounds(line, evidence[line])
        return bool(failed) and 0 not in failed and raw is not None and raw * max(1.0, proven) <= self._cap

    def _factor(self, line: Line, evidence: Evidence) -> float:
        """The factor nearest to 1 that agrees with the trials: of this line, and of others where it says nothing."""
        proven, high = self._bounds(line, evidence[line])
        failures = sum((self.raw(line, index) or math.inf) <= self._cap for index in evidence[line].failed)
        low = proven * (1 + PUSH * 3 ** (failures - 1)) if failures else proven
        others = [self._bounds(other, own) for other, own in evidence.touched()]
        low = max([low] + [min(other_low, high) for other_low, _ in others])
        if high == math.inf:
            high = max((other_high for _, other_high in others if other_high < math.inf), default=math.inf)
        return max(low, min(1.0, high))

    def _bounds(self, line: Line, own: LineEvidence) -> tuple[float, float]:
        """What the factor lies between: running out proves that the need is above the cap, a peak that it is no more.

        Predictions that were above the cap already prove nothing by running out.
        """
        peak = own.peaks.get(own.largest_fit)
        predicted = self.raw(line, own.largest_fit) if peak else None
        high = peak / predicted if peak and predicted else math.inf
        proofs = [self._cap / raw for index in own.failed if (raw := self.raw(line, index)) and raw <= self._cap]
        return max(proofs, default=0.0), high
