"""Which trials no other beats in both speed and memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from autofit.plan import Plan, Trial


class Point(NamedTuple):
    """A trial with a speed and a peak; `measured` says whether it ran at full size."""

    trial: Trial
    peak_bytes: int
    rate: float
    measured: bool


def points(plan: Plan) -> list[Point]:
    """The trials of which both speed and peak are known, measured or predicted."""
    found = []
    for trial in plan.trials:
        peak = trial.known_peak_bytes
        if peak is not None and trial.samples_per_second:
            found.append(Point(trial, peak, trial.samples_per_second, trial.peak_reserved_bytes is not None))
    return found


def pareto_front(known: Iterable[Point]) -> list[Point]:
    """Of those that are feasible or forecast, the ones that none beats in speed without more memory; by memory."""
    able = [point for point in known if point.trial.outcome in ("feasible", "predicted")]
    front: list[Point] = []
    for point in sorted(able, key=lambda p: (p.peak_bytes, -p.rate)):
        if not front or point.rate > front[-1].rate:
            front.append(point)
    return front
