"""How far up each line memory reaches: from the predictor where there is one, else from the peaks measured so far."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable

from autofit.candidate import Candidate
from autofit.search.evidence import Evidence, LineEvidence
from autofit.search.lines import Line, Space

Predict = Callable[[Candidate], int | None]

# After the n-th prediction that ran out on a line, this share · 2^(n-1) is added on top of what the failure proves.
PUSH = 0.03
# Without a predictor: an extrapolated peak may reach this share of the cap.
AIM = 0.97
# Without any figure to go by: the next try after running out is this many times smaller.
FALLBACK_FACTOR = 8
# What a line is expected to need per sample, relative to a measured one, before it has figures of its own.
FULL_TO_HALF_PRECISION = 2.0
RECOMPUTED_SHARE = 0.25


class Fit:
    """Beliefs about what fits under `cap_bytes`; what was measured always overrules what was predicted.

    `limit` answers for a line; it never lies at or above a split that ran out, nor below one that fitted.
    """

    def __init__(self, space: Space, *, cap_bytes: int | None, predict: Predict | None) -> None:
        self._space = space
        self._cap = cap_bytes
        self._predict = predict if cap_bytes is not None else None
        self._predicted: dict[tuple[int, int], int | None] = {}

    def limit(self, line: Line, evidence: Evidence) -> int:
        """The largest index of `line` that is believed to fit; -1 when none is."""
        own = evidence.lines[line.number]
        if own.given_up:
            return -1
        last = len(line.sizes) - 1 if own.smallest_failure is None else own.smallest_failure - 1
        believed = self._predicted_limit(line, evidence, last)
        if believed is None:
            believed = self._measured_limit(line, evidence, last)
        return max(believed, own.largest_fit)

    # With a predictor

    def predicted(self, line: Line, index: int) -> int | None:
        """The predictor's bytes for one candidate, asked once; None when it does not know."""
        if self._predict is None:
            return None
        if (line.number, index) not in self._predicted:
            self._predicted[line.number, index] = self._predict(line.candidates[index])
        return self._predicted[line.number, index]

    def corrected(self, line: Line, index: int, evidence: Evidence) -> int | None:
        """The prediction after what the trials taught about predictions."""
        predicted = self.predicted(line, index)
        return None if predicted is None else math.ceil(predicted * self._correction(line, evidence))

    def _predicted_limit(self, line: Line, evidence: Evidence, last: int) -> int | None:
        """By bisection, since memory grows along a line; None when a prediction is missing."""
        if self._predict is None or self._cap is None:
            return None
        factor = self._correction(line, evidence)
        low, high = evidence.lines[line.number].largest_fit, last
        while low < high:
            middle = (low + high + 1) // 2
            predicted = self.predicted(line, middle)
            if predicted is None:
                return None
            if predicted * factor <= self._cap:
                low = middle
            else:
                high = middle - 1
        return low

    def _correction(self, line: Line, evidence: Evidence) -> float:
        """The factor nearest to 1 that agrees with this line's trials; without any, with the other lines' failures."""
        low, high = self._correction_bounds(line, evidence.lines[line.number])
        if high == math.inf and low == 0.0:
            low = max(self._correction_bounds(other, evidence.lines[other.number])[0] for other in self._space.lines)
        return max(low, min(1.0, high))

    def _correction_bounds(self, line: Line, own: LineEvidence) -> tuple[float, float]:
        """Running out proves that the need is above the cap; a peak proves that the need is no higher."""
        assert self._cap is not None
        low, high = 0.0, math.inf
        for index, peak in own.peaks.items():
            predicted = self.predicted(line, index)
            if predicted and peak:
                high = min(high, peak / predicted)
        proofs = [self._cap / p for index in own.failed if (p := self.predicted(line, index)) and p <= self._cap]
        if proofs:
            low = max(proofs) * (1 + PUSH * 2 ** (len(proofs) - 1))
        return low, high

    # Without one

    def _measured_limit(self, line: Line, evidence: Evidence, last: int) -> int:
        own = evidence.lines[line.number]
        reach = self._reach(line, evidence)
        failure = own.smallest_failure
        if failure is not None and reach >= line.sizes[failure]:
            # The model said that the failure would fit, so only the bracket is left to go by.
            fitted = line.sizes[own.largest_fit] if own.largest_fit >= 0 else None
            reach = _middle(fitted, line.sizes[failure])
        return min(last, bisect_right(line.sizes, reach) - 1)

    def _reach(self, line: Line, evidence: Evidence) -> float:
        """The micro-batch at which the affine model of the peak meets the cap; infinite when nothing speaks against."""
        own = evidence.lines[line.number]
        cap = self._cap if self._cap is not None else _largest_peak(evidence)
        known = _points(line, own)
        if known and cap is not None:
            base, slope = self._affine(known, self._shared_base(evidence))
            return (cap * AIM - base) / slope if slope > 0 else math.inf
        if known:
            return math.inf
        reach = self._borrowed_reach(line, evidence, cap)
        failure = own.smallest_failure
        if failure is None:
            return reach
        return min(reach, line.sizes[failure] / (2 if reach < math.inf else FALLBACK_FACTOR))

    def _borrowed_reach(self, line: Line, evidence: Evidence, cap: int | None) -> float:
        """A first guess for a line without a peak of its own, from the lines that have one."""
        base = self._shared_base(evidence)
        guesses = []
        for other in self._space.lines:
            known = _points(other, evidence.lines[other.number])
            if known and cap is not None:
                base_there, slope = self._affine(known, base)
                slope *= _expected_share(line, other)
                if slope > 0:
                    guesses.append((_distance(line, other), (cap * AIM - base_there) / slope))
        if guesses:
            return min(guesses)[1]
        if any(own.peaks for own in evidence.lines):
            return math.inf
        failures = [
            other.sizes[failure]
            for other in self._space.lines
            if other is not line and (failure := evidence.lines[other.number].smallest_failure) is not None
        ]
        return min(failures, default=math.inf)

    def _shared_base(self, evidence: Evidence) -> float | None:
        """Bytes that do not depend on the micro-batch (weights, gradients, optimizer): much the same on all lines."""
        bases = []
        for line in self._space.lines:
            known = _points(line, evidence.lines[line.number])
            if len(known) >= 2:
                bases.append(self._affine(known, None)[0])
        return max(0.0, min(bases)) if bases else None

    @staticmethod
    def _affine(known: list[tuple[int, int]], base: float | None) -> tuple[float, float]:
        """(bytes at micro-batch 0, bytes per sample) through the two largest points, or through one and `base`.

        A single point without a base is put down to the samples alone: that never promises too much.
        """
        size, peak = known[-1]
        if len(known) >= 2:
            smaller, lower = known[-2]
            slope = (peak - lower) / (size - smaller)
            return peak - slope * size, slope
        base = base if base is not None and base < peak else 0.0
        return base, (peak - base) / size


def _points(line: Line, own: LineEvidence) -> list[tuple[int, int]]:
    """(micro-batch, peak) of what fitted, one per micro-batch, smallest first."""
    return sorted({line.sizes[index]: peak for index, peak in own.peaks.items() if peak}.items())


def _largest_peak(evidence: Evidence) -> int | None:
    """What memory held at most before it ran out: stands in for a cap that nobody told; None if nothing ran out."""
    failures = [reached for own in evidence.lines for reached in own.failed.values() if reached]
    peaks = [peak for own in evidence.lines for peak in own.peaks.values() if peak]
    return max(failures + peaks) if failures else None


def _middle(fitted: int | None, failed: int) -> float:
    """The next micro-batch to try inside a bracket: halfway, in ratio while the bracket is wide."""
    if fitted is None:
        return failed / 2
    return math.sqrt(fitted * failed) if failed > 4 * fitted else (fitted + failed) / 2


def _expected_share(line: Line, other: Line) -> float:
    """How much memory per sample `line` is expected to take, relative to `other`."""
    share = 1.0
    if line.half_precision != other.half_precision:
        share *= 1 / FULL_TO_HALF_PRECISION if line.half_precision else FULL_TO_HALF_PRECISION
    if line.recomputes != other.recomputes:
        share *= RECOMPUTED_SHARE if line.recomputes else 1 / RECOMPUTED_SHARE
    return share


def _distance(line: Line, other: Line) -> tuple[bool, bool, int]:
    """How unlike two lines are, for choosing whose figures to borrow."""
    return line.recomputes != other.recomputes, line.half_precision != other.half_precision, other.number
