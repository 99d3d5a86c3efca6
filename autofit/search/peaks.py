"""What fits, without a predictor: peaks grow affinely with the micro-batch, from a base that all lines share."""

from __future__ import annotations

import math

from autofit.search.evidence import Evidence, LineEvidence
from autofit.search.lines import Line

# Without any figure to go by: the next try after running out is this many times smaller.
FALLBACK_FACTOR = 8
# What a line is expected to need per sample, relative to a measured one, before it has figures of its own.
FULL_TO_HALF_PRECISION = 2.0
RECOMPUTED_SHARE = 0.25
# Share of a single peak that is taken to be base, when taking none leaves nothing larger to try.
HOPED_BASE_SHARE = 0.5


def reach(line: Line, evidence: Evidence, *, cap_bytes: int | None) -> float:
    """The micro-batch size up to which `line` is believed to fit; infinite when nothing speaks against any.

    Exceeding it costs one trial that runs out; nothing is ever concluded from it alone.
    """
    own = evidence[line]
    cap = cap_bytes if cap_bytes is not None else _reached_when_running_out(evidence)
    estimate = _estimate(line, own, evidence, cap)
    if own.smallest_failure is None:
        return estimate
    failure = line.sizes[own.smallest_failure]
    if estimate < failure:
        return estimate
    # The model said that the failure would fit, so only the bracket around the limit is left to go by.
    fitted = line.sizes[own.largest_fit] if own.largest_fit >= 0 else None
    return max(_inside_bracket(fitted, failure), _next_larger(line, fitted or 0))


def _estimate(line: Line, own: LineEvidence, evidence: Evidence, cap: int | None) -> float:
    known = _points(line, own)
    if not known:
        return _borrowed(line, own, evidence, cap)
    if cap is None:
        return math.inf
    base = _shared_base(evidence)
    estimate = _meets(cap, *_affine(known, base))
    size, peak = known[-1]
    if len(known) == 1 and base is None and estimate < _next_larger(line, size):
        return _meets(cap, *_affine(known, peak * HOPED_BASE_SHARE))
    return estimate


def _borrowed(line: Line, own: LineEvidence, evidence: Evidence, cap: int | None) -> float:
    """A guess for a line without a peak of its own, from the most similar line that has one.

    What is only borrowed rules no line out: its smallest split remains.
    """
    base = _shared_base(evidence)
    measured = [(other, known) for other, theirs in evidence.touched() if (known := _points(other, theirs))]
    guess = math.inf
    if measured and cap is not None:
        other, known = min(measured, key=lambda pair: _unlikeness(line, pair[0]))
        base_there, slope = _affine(known, base)
        guess = _meets(cap, base_there, slope * _expected_share(line, other))
    elif not measured:
        failures = [_smallest_failure(other, theirs) for other, theirs in evidence.touched() if other is not line]
        guess = min(failures, default=math.inf)
    if own.smallest_failure is None:
        return max(guess, line.sizes[0])
    smaller_by = FALLBACK_FACTOR if guess == math.inf else 2
    return max(min(guess, line.sizes[own.smallest_failure] / smaller_by), line.sizes[0])


def _shared_base(evidence: Evidence) -> float | None:
    """Bytes that do not depend on the micro-batch (weights, gradients, optimizer); None until a line has two peaks."""
    curves = [known for line, own in evidence.touched() if len(known := _points(line, own)) >= 2]
    return max(0.0, min(_affine(known, None)[0] for known in curves)) if curves else None


def _affine(known: list[tuple[int, int]], base: float | None) -> tuple[float, float]:
    """(bytes without any sample, bytes per sample) through the two largest points, or through one and `base`.

    A single point without a base is put down to the samples alone, which never promises too much.
    """
    size, peak = known[-1]
    if len(known) >= 2:
        smaller, lower = known[-2]
        slope = (peak - lower) / (size - smaller)
        return peak - slope * size, slope
    base = base if base is not None and base < peak else 0.0
    return base, (peak - base) / size


def _meets(cap: int, base: float, slope: float) -> float:
    """The micro-batch size at which base + slope · size is the cap."""
    return (cap - base) / slope if slope > 0 else math.inf


def _points(line: Line, own: LineEvidence) -> list[tuple[int, int]]:
    """(micro-batch size, peak) of what fitted, one per size, smallest first."""
    return sorted({line.sizes[index]: peak for index, peak in own.peaks.items() if peak}.items())


def _smallest_failure(line: Line, own: LineEvidence) -> float:
    return math.inf if own.smallest_failure is None else line.sizes[own.smallest_failure]


def _next_larger(line: Line, size: int) -> float:
    return next((larger for larger in line.sizes if larger > size), math.inf)


def _reached_when_running_out(evidence: Evidence) -> int | None:
    """The most that memory held in a search in which something ran out: stands in for a cap that nobody told."""
    failures = [reached for _, own in evidence.touched() for reached in own.failed.values() if reached]
    peaks = [peak for _, own in evidence.touched() for peak in own.peaks.values() if peak]
    return max(failures + peaks) if failures else None


def _inside_bracket(fitted: int | None, failed: int) -> float:
    """The next size to try between one that fitted and one that failed: halfway, in ratio while they lie far apart."""
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


def _unlikeness(line: Line, other: Line) -> tuple[bool, bool, int]:
    return line.recomputes != other.recomputes, line.half_precision != other.half_precision, other.number
