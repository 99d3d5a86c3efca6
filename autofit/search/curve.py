"""Speed along one line: what the measured splits say about the others.

A step of a micro-steps costs a·t(m) + t_optimizer. With t(m) = c0 + c1·m that is affine in a, so seconds per sample
are affine in x = micro-steps per sample, and a straight line through two points says what lies between and beyond.
Real curves bend: devices saturate, caches overflow, allocators thrash near the limit.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from autofit.search.evidence import LineEvidence
from autofit.search.lines import Line

# How much faster far smaller micro-batches may be, while nothing has shown how speed depends on the split.
UNEXPLORED_GAIN = 0.15
# Points this many doublings apart show how speed depends on the split; nearer ones show little but noise.
SHAPE_OCTAVES = 2.0
# On a line that is shorter than that, this share of its length.
SHAPE_SHARE = 0.4
# Points nearer than this differ by noise and tidiness, not by shape: the fastest stands for them.
SAME_PLACE_OCTAVES = 0.5
# How far a saturating curve may run below the straight line between two points, as a share of the rise.
SATURATION = 0.5
# The most that a falling curve promises beyond its last point.
MOST_EXTRAPOLATED_GAIN = 0.30


@dataclass(frozen=True)
class Point:
    """A measured split: micro-batch size, micro-steps per sample, seconds per sample.

    `crowded`: so near the limit that the allocator may have been what took the time.
    """

    size: int
    steps: float
    cost: float
    crowded: bool = False


@dataclass(frozen=True)
class Curve:
    """The measured points of a line, smallest micro-batch first; `octaves` is how many doublings the line spans."""

    points: tuple[Point, ...]
    octaves: float

    @classmethod
    def of(cls, line: Line, own: LineEvidence) -> Curve | None:
        """The points of a line, no two in the same place; None when there is none."""
        points: list[Point] = []
        for index in sorted(own.costs, key=lambda i: own.costs[i]):
            point = Point(line.sizes[index], line.steps[index], own.costs[index], crowded=index in own.crowded)
            if all(octaves(point.size, other.size) >= SAME_PLACE_OCTAVES for other in points):
                points.append(point)
        if not points:
            return None
        return cls(tuple(sorted(points, key=lambda p: p.size)), octaves(line.sizes[-1], line.sizes[0]))

    @property
    def shown(self) -> float:
        """How well the points show how speed depends on the split, from 0 to 1: by how far they lie apart."""
        if len(self.points) < 2:
            return 0.0
        enough = min(SHAPE_OCTAVES, self.octaves * SHAPE_SHARE)
        return min(1.0, octaves(self.points[-1].size, self.points[0].size) / enough)

    def distance(self, size: int) -> float:
        """Doublings from `size` to the nearest point."""
        return min(octaves(size, point.size) for point in self.points)

    def estimate(self, size: int, steps: float) -> float:
        """Seconds per sample on the straight line through the two points around, or the two nearest; needs two."""
        smaller, larger = self._around(size)
        slope = (smaller.cost - larger.cost) / (smaller.steps - larger.steps)
        if size < smaller.size and slope < 0:
            gain = (1 - smaller.cost / larger.cost) / octaves(larger.size, smaller.size)
            return smaller.cost * (1 - min(MOST_EXTRAPOLATED_GAIN, gain * octaves(smaller.size, size)))
        if size > larger.size:
            return max(all_overhead(larger, steps), larger.cost + slope * (steps - larger.steps))
        return smaller.cost + slope * (steps - smaller.steps)

    def least(self, size: int, steps: float) -> float:
        """The fewest seconds per sample that the points allow; needs two."""
        estimate = self.estimate(size, steps)
        if size < self.points[0].size:
            fastest = min(self.points, key=lambda point: point.cost)
            return self.shown * estimate + (1 - self.shown) * unexplored(fastest, size)
        if size > self.points[-1].size:
            return estimate
        smaller, larger = self._around(size)
        if larger.crowded and larger.cost > smaller.cost:
            # It was slower for want of room, so the minimum lies in between.
            return unexplored(smaller, size)
        return estimate - SATURATION * max(0.0, estimate - larger.cost)

    def _around(self, size: int) -> tuple[Point, Point]:
        place = bisect_left([point.size for point in self.points], size)
        right = min(max(place, 1), len(self.points) - 1)
        return self.points[right - 1], self.points[right]


def octaves(size: int, other: int) -> float:
    """How many doublings lie between two micro-batch sizes."""
    return abs(math.log2(size / other))


def unexplored(known: Point, size: int) -> float:
    """The fewest seconds per sample away from `known` when nothing shows how speed depends on the split."""
    return known.cost * (1 - UNEXPLORED_GAIN * min(1.0, octaves(size, known.size) / SHAPE_OCTAVES))


def all_overhead(known: Point, steps: float) -> float:
    """Seconds per sample if all the time at `known` were overhead per micro-step: no larger split is faster."""
    return known.cost * steps / known.steps
