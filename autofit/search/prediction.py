"""What a predictor says about what fits, and how far trials have shown it to be off."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from autofit.candidate import Candidate
from autofit.search.evidence import Evidence, LineEvidence
from autofit.search.lines import Line, Space

Predict = Callable[[Candidate], int | None]

# After the n-th prediction that ran out on a line, this share · 3^(n-1) is added to what the failure proves.
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
        factor = self._factor(line, evidence)
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

    def _factor(self, line: Line, evidence: Evidence) -> float:
        """The factor nearest to 1 that agrees with the trials: of this line, and of others where it says nothing."""
        low, high = self._bounds(line, evidence[line])
        others = [self._bounds(other, own) for other, own in evidence.touched()]
        low = max([low] + [min(other_low, high) for other_low, _ in others])
        if high == math.inf:
            high = max((other_high for _, other_high in others if other_high < math.inf), default=math.inf)
        return max(low, min(1.0, high))

    def _bounds(self, line: Line, own: LineEvidence) -> tuple[float, float]:
        """A peak proves that the need is no higher, running out that it is above the cap."""
        low, high = 0.0, math.inf
        peak = own.peaks.get(own.largest_fit)
        if peak and (raw := self.raw(line, own.largest_fit)):
            high = peak / raw
        proofs = [self._cap / raw for index in own.failed if (raw := self.raw(line, index)) and raw <= self._cap]
        if proofs:
            low = max(proofs) * (1 + PUSH * 3 ** (len(proofs) - 1))
        return low, high
