"""How fast a candidate could be, at best: what decides whether it is worth a trial.

A step of a micro-steps costs a·t(m) + t_optimizer. With t(m) = c0 + c1·m that is affine in a, so seconds per sample
are affine in x = micro-steps per sample, and a line through measured points says what lies between and beyond them.
Real curves bend (saturation, caches, thrashing near the limit), so every estimate is lowered the further away it lies.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from autofit.search.evidence import Evidence, LineEvidence
from autofit.search.lines import Line, Space

# How much faster than its estimate a candidate may turn out, per doubling between it and the nearest measured one.
SURPRISE_PER_OCTAVE = 0.008
# Extra doubt about a shape that was measured on another line.
SURPRISE_TRANSFERRED = 0.03
# A line that was never tried may be this much faster than the best: low enough that each is tried once.
UNOPENED = 0.80
# How much faster far smaller micro-batches may be, while nothing has shown how speed depends on the split.
UNEXPLORED_GAIN = 0.15
# What a candidate may gain over a larger one that ran so near the limit that the allocator had to work.
ROOM_GAIN = 0.05
# Points this many doublings apart show how speed depends on the split; nearer ones show little but noise.
SHAPE_OCTAVES = 2.0
# A shape that is shown this well (1: fully) may stand in for that of another line.
ENOUGH_SHAPE = 0.5
# Points nearer than this differ by noise and tidiness, not by shape: the fastest stands for them.
SAME_PLACE_OCTAVES = 0.5
# A micro-batch divisible by 8 may be this much faster than others around it: matrix units work in tiles.
TIDY_GAIN = 0.04
# How far a saturating curve may run below the straight line between two points, as a share of the rise.
SATURATION = 0.5
# Further improvement that a falling curve may promise beyond its last point.
MOST_EXTRAPOLATED_GAIN = 0.30
# Recomputing costs at least this factor, until a measurement says how much; then nearly what was measured.
RECOMPUTATION_AT_LEAST = 1.10
RECOMPUTATION_SLACK = 0.95
# A line that recomputes and was never tried waits until the split's effect is known.
UNOPENED_RECOMPUTING = 0.90


@dataclass(frozen=True)
class Point:
    """A measured split: micro-batch, micro-steps per sample, seconds per sample.

    `crowded`: measured so near the limit that the allocator may have been what took the time.
    """

    size: int
    steps: float
    cost: float
    crowded: bool


class Speed:
    """Optimistic seconds per sample, as far as `evidence` goes."""

    def __init__(self, space: Space, evidence: Evidence) -> None:
        self._space = space
        self._evidence = evidence
        self._curves = {line.number: curve for line, own in evidence.touched() if (curve := _curve(line, own))}
        self._best = evidence.best_cost

    def floor(self, line: Line, index: int) -> float:
        """The fewest seconds per sample that the unmeasured candidate at `index` can plausibly take."""
        size = line.sizes[index]
        return self._floor(line, size, line.steps[index]) * (1 - self._bonus(line, size))

    def _bonus(self, line: Line, size: int) -> float:
        """What a tidy size, or one with room, may gain over its neighbours while none like it has been measured."""
        own = self._evidence[line]
        near = [(line.sizes[i], i in own.crowded) for i in own.costs if _octaves(size, line.sizes[i]) <= 1]
        bonus = 0.0
        if near and is_tidy(size) and not any(is_tidy(other) for other, _ in near):
            bonus += TIDY_GAIN
        if near and all(crowded and other > size for other, crowded in near):
            bonus += ROOM_GAIN
        return bonus

    def _floor(self, line: Line, size: int, steps: float) -> float:
        curve = self._curves.get(line.number)
        if curve is None:
            return self._unopened(line, size, steps)
        distance = min(_octaves(size, point.size) for point in curve)
        surprise = 1 - min(0.5, SURPRISE_PER_OCTAVE * distance)
        if size > curve[-1].size and len(curve) == 1:
            return self._beyond_one(line, curve[0], size, steps) * surprise
        if size < curve[0].size and len(curve) == 1:
            return self._below_one(line, curve[0], size, steps) * surprise
        if size < curve[0].size:
            return _below(line, curve, size, steps) * surprise
        return _optimistic(curve, size, steps) * surprise

    def _beyond_one(self, line: Line, known: Point, size: int, steps: float) -> float:
        """Larger than the only point: as another line behaves, else as if all its time were overhead per step."""
        all_overhead = known.cost * steps / known.steps
        return max(all_overhead, self._transferred(line, known, size, steps) or 0.0)

    def _below_one(self, line: Line, known: Point, size: int, steps: float) -> float:
        """Smaller than the only point: as another line behaves, but the best line has to be explored itself."""
        if known.crowded or known.cost == self._best:
            return _unexplored(known, size)
        return self._transferred(line, known, size, steps) or _unexplored(known, size)

    def _transferred(self, line: Line, known: Point, size: int, steps: float) -> float | None:
        """From one point, by the shape of the line that shows one best; None when none does."""
        shaped = [
            (other.recomputes != line.recomputes, -len(curve), other.number)
            for other, _ in self._evidence.touched()
            if (curve := self._curves.get(other.number)) and _shape_shown(other, curve) >= ENOUGH_SHAPE
        ]
        if not shaped:
            return None
        reference = self._curves[min(shaped)[2]]
        here, there = _estimate(reference, size, steps), _estimate(reference, known.size, known.steps)
        return min(known.cost * here / there, known.cost + here - there) * (1 - SURPRISE_TRANSFERRED)

    def _unopened(self, line: Line, size: int, steps: float) -> float:
        if self._best is None:
            return 0.0
        twin = self._space.twins[line.number]
        if twin is None or twin.number not in self._curves:
            return self._best * UNOPENED
        recomputing = self._floor(twin, size, steps) * self._recomputation()
        return max(recomputing, self._best * UNOPENED_RECOMPUTING)

    def _recomputation(self) -> float:
        """The least factor by which recomputing slows a step down."""
        factors = []
        for line, _ in self._evidence.touched():
            twin = self._space.twins[line.number]
            plain = self._curves.get(twin.number, ()) if twin else ()
            if len(plain) >= 2:
                factors += [p.cost / _estimate(plain, p.size, p.steps) for p in self._curves.get(line.number, ())]
        return max(RECOMPUTATION_AT_LEAST, min(factors) * RECOMPUTATION_SLACK) if factors else RECOMPUTATION_AT_LEAST


def is_tidy(size: int) -> bool:
    """Whether a micro-batch suits the tiles of matrix units."""
    return size % 8 == 0


def _octaves(size: int, other: int) -> float:
    return abs(math.log2(size / other))


def _shape_shown(line: Line, curve: tuple[Point, ...]) -> float:
    """How well the points show how speed depends on the split, from 0 to 1: by how far they lie apart."""
    enough = min(SHAPE_OCTAVES, _octaves(line.sizes[-1], line.sizes[0]) / 2.5)
    return min(1.0, _octaves(curve[-1].size, curve[0].size) / enough) if len(curve) >= 2 else 0.0


def _curve(line: Line, own: LineEvidence) -> tuple[Point, ...]:
    """The measured points of a line, smallest micro-batch first, no two in the same place."""
    curve: list[Point] = []
    for index in sorted(own.costs, key=lambda i: own.costs[i]):
        point = Point(line.sizes[index], line.steps[index], own.costs[index], crowded=index in own.crowded)
        if all(_octaves(point.size, other.size) >= SAME_PLACE_OCTAVES for other in curve):
            curve.append(point)
    return tuple(sorted(curve, key=lambda point: point.size))


def _unexplored(known: Point, size: int) -> float:
    return known.cost * (1 - UNEXPLORED_GAIN * min(1.0, _octaves(size, known.size) / SHAPE_OCTAVES))


def _below(line: Line, curve: tuple[Point, ...], size: int, steps: float) -> float:
    """Smaller than all points: where they lead, as far as they lie apart, and otherwise as if unexplored."""
    shown = _shape_shown(line, curve)
    fastest = min(curve, key=lambda point: point.cost)
    return shown * _estimate(curve, size, steps) + (1 - shown) * _unexplored(fastest, size)


def _optimistic(curve: tuple[Point, ...], size: int, steps: float) -> float:
    """The least that the points around allow: a saturating curve runs below their straight line, never above.

    Below a crowded point that was slower than a smaller one, the minimum lies in between.
    """
    estimate = _estimate(curve, size, steps)
    if not curve[0].size < size < curve[-1].size:
        return estimate
    smaller, larger = _around(curve, size)
    if larger.crowded and larger.cost > smaller.cost:
        return _unexplored(smaller, size)
    return estimate - SATURATION * max(0.0, estimate - larger.cost)


def _estimate(curve: tuple[Point, ...], size: int, steps: float) -> float:
    """Seconds per sample through the two measured points around, or the two nearest beyond them."""
    smaller, larger = _around(curve, size)
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


def _around(curve: tuple[Point, ...], size: int) -> tuple[Point, Point]:
    place = bisect_left([point.size for point in curve], size)
    right = min(max(place, 1), len(curve) - 1)
    return curve[right - 1], curve[right]
