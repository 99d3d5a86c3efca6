"""How fast a candidate could be, at best."""

from __future__ import annotations

import pytest
from simulated import affine_seconds, fitted, space

from autofit.candidate import Candidate
from autofit.search.curve import Curve, Point
from autofit.search.evidence import Evidence
from autofit.search.lines import Line, Space
from autofit.search.speed import Speed
from autofit.units import GiB

SPACE = Space(space(precisions=("float32", "bfloat16"), modes=("none", "full")))
HALF, SINGLE, HALF_FULL, SINGLE_FULL = SPACE.lines


def point(size: int, cost: float, *, crowded: bool = False) -> Point:
    """A point of a line of 512 samples."""
    return Point(size, 1 / size, cost, crowded=crowded)


def curve(*points: Point) -> Curve:
    """A curve on a line from 1 to 512."""
    return Curve(tuple(sorted(points, key=lambda p: p.size)), 9.0)


@pytest.mark.parametrize("size", [1, 4, 16, 100, 128, 512])
def test_a_straight_line_is_followed_exactly(size):
    """Overhead per micro-step and time per sample: two points give every other, between and beyond."""
    costs = {m: 0.010 / m + 0.003 for m in (8, 64, size)}
    estimate = curve(point(8, costs[8]), point(64, costs[64])).estimate(size, 1 / size)
    assert estimate == pytest.approx(costs[size])


def test_a_falling_curve_is_followed_only_so_far():
    """Where smaller micro-batches are faster, further ones may be faster still, by octaves and not without end."""
    falling = curve(point(64, 0.9), point(128, 1.0))
    assert falling.estimate(32, 1 / 32) == pytest.approx(0.9 * 0.9)
    assert falling.estimate(1, 1) == pytest.approx(0.9 * 0.7)


def test_larger_is_never_faster_than_all_overhead():
    """Twice the micro-batch halves the cost at most."""
    steep = curve(point(8, 4.0), point(16, 1.0))
    assert steep.estimate(32, 1 / 32) == pytest.approx(0.5)


def test_between_two_points_a_saturating_curve_runs_below_their_line():
    """The least is between the faster point and the straight line."""
    bent = curve(point(16, 2.0), point(512, 1.0))
    assert 1.0 < bent.least(128, 1 / 128) < bent.estimate(128, 1 / 128)


def test_a_crowded_point_that_is_slower_hides_a_minimum():
    """Below a point that ran near the limit and was slower than a smaller one, speed may be better than at both."""
    crowded = curve(point(16, 1.0), point(512, 3.0, crowded=True))
    roomy = curve(point(16, 1.0), point(512, 3.0))
    assert crowded.least(128, 1 / 128) < 0.9
    assert roomy.least(128, 1 / 128) > 1.0


def test_near_points_show_little():
    """Two points a few per cent apart do not show that smaller micro-batches are slow; two far apart do."""
    near = curve(point(171, 1.0), point(256, 0.99))
    far = curve(point(16, 1.2), point(256, 0.99))
    assert near.shown < 0.5
    assert far.shown == 1
    assert near.least(16, 1 / 16) < 0.99
    assert far.least(8, 1 / 8) > 1.2


def test_points_in_the_same_place_are_one():
    """Of measured splits that lie close together the fastest stands for all."""
    evidence = measured({(HALF, 128): 1.0, (HALF, 171): 1.02, (HALF, 16): 1.4})
    found = Curve.of(HALF, evidence[HALF])
    assert found is not None
    assert [p.size for p in found.points] == [16, 128]


def candidate_at(line: Line, size: int) -> Candidate:
    """The candidate of that micro-batch on a line."""
    return line.candidates[line.sizes.index(size)]


def measured(seconds: dict[tuple[Line, int], float], *, peak: int = GiB) -> Evidence:
    """Evidence of trials that took so many seconds a step."""
    tried = [(candidate_at(line, size), s) for (line, size), s in seconds.items()]
    return Evidence(SPACE, [(c, fitted(c, seconds=s, peak=peak)) for c, s in tried], cap_bytes=10 * GiB)


def gain(evidence: Evidence, line: Line, size: int) -> float:
    """How much faster than the best the candidate may be, at best: above 0.01 it is worth a trial."""
    assert evidence.best_cost is not None
    return 1 - Speed(SPACE, evidence).floor(line, line.sizes.index(size)) / evidence.best_cost


def test_every_line_is_opened_once():
    """A precision that was never tried is always worth a trial."""
    assert gain(measured({(HALF, 512): 1.0, (HALF, 16): 1.1}), SINGLE, 512) > 0.1


def test_recomputation_waits_for_a_reason():
    """Where the twin shows no gain from larger micro-batches, recomputing cannot pay; where it does, it may."""
    saturated = measured({(HALF, 64): 1.0, (HALF, 8): 1.01})
    overhead = measured({(HALF, 8): 1.0, (HALF, 2): 3.0})
    assert gain(saturated, HALF_FULL, 512) < 0
    assert gain(overhead, HALF_FULL, 512) > 0.01


def test_measured_recomputation_is_carried_over():
    """What recomputing costs in one precision says what it costs in another."""
    before = measured({(HALF, 64): 1.0, (HALF, 8): 3.0, (SINGLE, 64): 1.0, (SINGLE, 8): 3.0})
    after = measured({(HALF, 64): 1.0, (HALF, 8): 3.0, (SINGLE, 64): 1.0, (SINGLE, 8): 3.0, (HALF_FULL, 128): 1.6})
    assert gain(after, SINGLE_FULL, 256) < gain(before, SINGLE_FULL, 256)


def test_the_best_line_is_explored_below():
    """With one point on the best line, a much smaller micro-batch is worth a trial, whatever other lines did."""
    evidence = measured({(HALF, 512): 1.0, (SINGLE, 512): 2.0, (SINGLE, 16): 3.0})
    assert gain(evidence, HALF, 16) > 0.1
    assert gain(evidence, HALF, 512 // 2) < gain(evidence, HALF, 16)


def test_slow_lines_are_not_explored():
    """A line that is far slower at its largest micro-batch is left, once another has shown the effect of the split."""
    evidence = measured({(HALF, 512): 1.0, (HALF, 16): 1.5, (SINGLE, 512): 1.1})
    assert gain(evidence, SINGLE, 16) < 0


def test_tidy_sizes_get_a_chance():
    """Next to sizes that are no multiple of 8, one that is may be faster; once one was measured, no more."""
    untidy = measured({(HALF, 171): 1.0, (HALF, 14): 2.5})
    assert gain(untidy, HALF, 128) > 0.01
    assert gain(untidy, HALF, 103) < 0.01
    tidy = measured({(HALF, 171): 1.0, (HALF, 14): 2.5, (HALF, 128): 1.0})
    assert gain(tidy, HALF, 64) < 0.01


def test_room_near_the_limit_gets_a_chance():
    """A little below a candidate that filled the memory, one with room may be faster."""
    roomy = measured({(HALF, 171): 1.0, (HALF, 16): 1.5}, peak=5 * GiB)
    full = measured({(HALF, 171): 1.0, (HALF, 16): 1.5}, peak=int(9.9 * GiB))
    assert gain(full, HALF, 103) > 0.01 > gain(roomy, HALF, 103)


def test_an_affine_device_leaves_nothing_to_try():
    """Once the ends of a line are measured and agree with the model, nothing in between is worth a trial."""
    ends = {(line, size): affine_seconds(candidate_at(line, size)) for line in (HALF, SINGLE) for size in (512, 16)}
    evidence = measured(ends)
    assert (
        max(gain(evidence, line, size) for line in (HALF, SINGLE) for size in line.sizes if size not in (16, 512))
        < 0.01
    )
