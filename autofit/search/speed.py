"""How fast a candidate could be, at best: what decides whether it is worth a trial."""

from __future__ import annotations

from autofit.search.curve import MOST_EXTRAPOLATED_GAIN, Curve, Point, all_overhead, octaves, unexplored
from autofit.search.evidence import Evidence
from autofit.search.lines import Line, Space

# How much faster than its estimate a candidate may turn out, per doubling between it and the nearest measured one.
SURPRISE_PER_OCTAVE = 0.008
# Extra doubt about a shape that was measured on another line.
SURPRISE_TRANSFERRED = 0.03
# A shape that is shown this well (1: fully) may stand in for that of another line.
ENOUGH_SHAPE = 0.5
# A micro-batch divisible by 8 may be this much faster than others around it: matrix units work in tiles.
TIDY_GAIN = 0.04
# What a candidate may gain over a larger one that ran so near the limit that the allocator had to work.
ROOM_GAIN = 0.05
# A line that was never tried may be this much faster than the best: low enough that each is tried once.
UNOPENED = 0.80
# One that recomputes waits until more promising ones have shown how speed depends on the split.
UNOPENED_RECOMPUTING = 0.90
# Recomputing costs at least this factor, until a measurement says how much; then nearly what was measured.
RECOMPUTATION_AT_LEAST = 1.10
RECOMPUTATION_SLACK = 0.95


class Speed:
    """Optimistic seconds per sample, as far as `evidence` goes."""

    def __init__(self, space: Space, evidence: Evidence) -> None:
        self._space = space
        self._evidence = evidence
        self._curves = {line.number: curve for line, own in evidence.touched() if (curve := Curve.of(line, own))}
        self._best = evidence.best_cost

    def floor(self, line: Line, index: int) -> float:
        """The fewest seconds per sample that the unmeasured candidate at `index` can plausibly take."""
        size = line.sizes[index]
        return self._floor(line, size, line.steps[index]) * (1 - self._bonus(line, size))

    def _bonus(self, line: Line, size: int) -> float:
        """What a tidy size, or one with room, may gain over its neighbours while none like it has been measured."""
        own = self._evidence[line]
        near = [(line.sizes[i], i in own.crowded) for i in own.costs if octaves(size, line.sizes[i]) <= 1]
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
        if len(curve.points) > 1:
            floor = curve.least(size, steps)
        elif size > curve.points[0].size:
            floor = self._above_one(line, curve.points[0], size, steps)
        else:
            floor = self._below_one(line, curve.points[0], size, steps)
        return floor * (1 - min(0.5, SURPRISE_PER_OCTAVE * curve.distance(size)))

    def _above_one(self, line: Line, known: Point, size: int, steps: float) -> float:
        """Larger than the only point: as another line behaves, else as if all its time were overhead per step."""
        return max(all_overhead(known, steps), self._transferred(line, known, size, steps) or 0.0)

    def _below_one(self, line: Line, known: Point, size: int, steps: float) -> float:
        """Smaller than the only point: as another line behaves, but the best line has to be explored itself."""
        transferred = self._transferred(line, known, size, steps)
        if transferred is None or known.crowded or known.cost == self._best:
            return unexplored(known, size)
        return max(transferred, known.cost * (1 - MOST_EXTRAPOLATED_GAIN))

    def _transferred(self, line: Line, known: Point, size: int, steps: float) -> float | None:
        """From one point, by the shape of the line that shows one best; None when none does.

        What splits differ by may be overhead, which is the same on both lines, or arithmetic, which is in proportion.
        """
        shaped = [
            (other.recomputes != line.recomputes, -len(curve.points), other.number)
            for other, _ in self._evidence.touched()
            if (curve := self._curves.get(other.number)) and curve.shown >= ENOUGH_SHAPE
        ]
        if not shaped:
            return None
        reference = self._curves[min(shaped)[2]]
        here, there = reference.estimate(size, steps), reference.estimate(known.size, known.steps)
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
            plain, own = self._curves.get(twin.number) if twin else None, self._curves.get(line.number)
            if plain and own and len(plain.points) > 1:
                factors += [point.cost / plain.estimate(point.size, point.steps) for point in own.points]
        return max(RECOMPUTATION_AT_LEAST, min(factors) * RECOMPUTATION_SLACK) if factors else RECOMPUTATION_AT_LEAST


def is_tidy(size: int) -> bool:
    """Whether a micro-batch suits the tiles of matrix units."""
    return size % 8 == 0
