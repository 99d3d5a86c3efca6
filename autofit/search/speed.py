"""How fast a candidate could be, at best: what decides whether it is worth a trial.

A step of a micro-steps costs a·t(m) + t_optimizer. With t(m) = c0 + c1·m that is affine in a, so seconds per sample
are affine in x = micro-steps per sample, and a line through measured points says what lies between and beyond them.
Real curves bend (saturation, caches, thrashing near the limit), so every estimate is lowered the further away it lies.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from autofit.search.evidence import Evidence
from autofit.search.lines import Line, Space

# How much faster than its estimate a candidate may turn out, per doubling between it and the nearest measured one.
SURPRISE_PER_OCTAVE = 0.008
# Extra doubt about a shape that was measured on another line.
SURPRISE_TRANSFERRED = 0.03
# A line that was never tried may be this much faster than the best: low enough that each is tried once.
UNOPENED = 0.80
# Smaller micro-batches than any measured, while no line has shown how speed depends on the split.
UNEXPLORED = 0.85
# Further improvement that a falling curve may promise beyond its last point.
MOST_EXTRAPOLATED_GAIN = 0.30
# Recomputing costs at least this factor, until a measurement says how much; then nearly what was measured.
RECOMPUTATION_AT_LEAST = 1.10
RECOMPUTATION_SLACK = 0.95
# A line that recomputes and was never tried waits until the split's effect is known.
UNOPENED_RECOMPUTING = 0.90


@dataclass(frozen=True)
class Point:
    """A measured split: micro-batch, micro-steps per sample, seconds per sample."""

    size: int
    steps: float
    cost: float


class Speed:
    """Optimistic seconds per sample, as far as `evidence` goes."""

    def __init__(self, space: Space, evidence: Evidence) -> None:
        self._space = space
        self._curves = tuple(_curve(line, evidence) for line in space.lines)
        self._best = evidence.best_cost

    def floor(self, line: Line, index: int) -> float:
        """The fewest seconds per sample that the unmeasured candidate at `index` can plausibly take."""
        return self._floor(line, line.sizes[index], line.steps[index])

    def _floor(self, line: Line, size: int, steps: float) -> float:
        curve = self._curves[line.number]
        if not curve:
            return self._unopened(line, size, steps)
        distance = min(abs(math.log2(size / point.size)) for point in curve)
        surprise = 1 - min(0.5, SURPRISE_PER_OCTAVE * distance)
        if len(curve) == 1:
            return self._from_one(line, curve[0], size, steps) * surprise
        return _estimate(curve, size, steps) * surprise

    def _from_one(self, line: Line, known: Point, size: int, steps: float) -> float:
        """From a single point: by the shape of the line that shows one best, else by the widest bounds."""
        all_overhead = known.cost * steps / known.steps
        reference = self._reference(line)
        if reference is None:
            return all_overhead if size > known.size else known.cost * UNEXPLORED
        here, there = _estimate(reference, size, steps), _estimate(reference, known.size, known.steps)
        estimate = min(known.cost * here / there, known.cost + here - there) * (1 - SURPRISE_TRANSFERRED)
        return max(estimate, all_overhead) if size > known.size else estimate

    def _reference(self, line: Line) -> tuple[Point, ...] | None:
        shaped = [
            (other.recomputes != line.recomputes, -len(curve), other.number)
            for other, curve in zip(self._space.lines, self._curves, strict=True)
            if len(curve) >= 2
        ]
        return self._curves[min(shaped)[2]] if shaped else None

    def _unopened(self, line: Line, size: int, steps: float) -> float:
        if self._best is None:
            return 0.0
        twin = self._space.twins[line.number]
        if twin is None or not self._curves[twin.number]:
            return self._best * UNOPENED
        recomputing = self._floor(twin, size, steps) * self._recomputation()
        return max(recomputing, self._best * UNOPENED_RECOMPUTING)

    def _recomputation(self) -> float:
        """The least factor by which recomputing slows a step down."""
        factors = []
        for line, twin in zip(self._space.lines, self._space.twins, strict=True):
            plain = self._curves[twin.number] if twin else ()
            if len(plain) >= 2:
                factors += [p.cost / _estimate(plain, p.size, p.steps) for p in self._curves[line.number]]
        return max(RECOMPUTATION_AT_LEAST, min(factors) * RECOMPUTATION_SLACK) if factors else RECOMPUTATION_AT_LEAST


def _curve(line: Line, evidence: Evidence) -> tuple[Point, ...]:
    costs = evidence.lines[line.number].costs
    return tuple(Point(line.sizes[index], line.steps[index], costs[index]) for index in sorted(costs))


def _estimate(curve: tuple[Point, ...], size: int, steps: float) -> float:
    """Seconds per sample through the two measured points around, or the two nearest beyond them."""
    place = bisect_left([point.size for point in curve], size)
    right = min(max(place, 1), len(curve) - 1)
    smaller, larger = curve[right - 1], curve[right]
    if smaller.steps == larger.steps:
        return larger.cost
    slope = (smaller.cost - larger.cost) / (smaller.steps - larger.steps)
    if size < smaller.size and slope < 0:
        gain = (1 - smaller.cost / larger.cost) / math.log2(larger.size / smaller.size)
        return smaller.cost * (1 - min(MOST_EXTRAPOLATED_GAIN, gain * math.log2(smaller.size / size)))
    if size > larger.size:
        least = larger.cost * steps / larger.steps
        return max(least, larger.cost + slope * (steps - larger.steps))
    return smaller.cost + slope * (steps - smaller.steps)
