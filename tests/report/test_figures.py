"""Pictures as data: axes, the Pareto front, and what each figure holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autofit.candidate import Candidate
from autofit.plan import Trial
from autofit.report.figure import bytes_axis, number_axis
from autofit.report.figures import figures, tradeoff
from autofit.report.front import Point, pareto_front
from tests.report.plans import MIB, load, seen

amounts = st.floats(min_value=0, max_value=1e12, allow_nan=False)


@given(st.lists(amounts, min_size=1, max_size=8), st.booleans())
def test_an_axis_holds_its_values(values: list[float], from_zero: bool) -> None:
    """A handful of ticks, rising, from at or below the least value to at or above the largest."""
    axis = number_axis("x", values, from_zero=from_zero)
    ticks = [value for value, _ in axis.ticks]
    assert ticks == sorted(set(ticks))
    assert 2 <= len(ticks) <= 7
    slack = 1e-6 * max(max(values), 1e-300)
    assert ticks[0] <= (0 if from_zero else min(values)) + slack
    assert ticks[-1] >= max(values) - slack


def test_bytes_are_counted_in_their_unit() -> None:
    """Round numbers of the unit of the largest value."""
    axis = bytes_axis("peak", [3.2 * 2**30])
    assert axis.label == "peak, GiB"
    assert axis.ticks[:3] == ((0, "0"), (2**30, "1"), (2 * 2**30, "2"))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12))
def test_the_front_is_what_none_beats(pairs: list[tuple[int, int]]) -> None:
    """Every point is on the front or has one there that is no worse in both; those on it differ in both."""
    candidate = Candidate(micro_batch_size=1, accumulation_steps=1)
    known = [
        Point(Trial(number=n, candidate=candidate, outcome="feasible"), peak, float(rate), True)
        for n, (peak, rate) in enumerate(pairs)
    ]
    front = pareto_front(known)
    assert all(any(f.peak_bytes <= p.peak_bytes and f.rate >= p.rate for f in front) for p in known)
    assert all(
        a is b or a.peak_bytes > b.peak_bytes or a.rate < b.rate or (a.peak_bytes < b.peak_bytes and a.rate < b.rate)
        for a in front
        for b in front
    )


def test_what_did_not_fit_is_not_on_the_front() -> None:
    """A fast trial above the budget is drawn, and wins nothing."""
    candidate = Candidate(micro_batch_size=1, accumulation_steps=1)
    over = Point(Trial(number=0, candidate=candidate, outcome="over_budget"), 1, 9.0, True)
    assert pareto_front([over]) == []


def test_every_trial_with_a_peak_is_a_mark() -> None:
    """The best is a star, and one far beyond the budget stands at the edge with its figure."""
    plan = load("cpu")
    far = plan.trials[0].model_copy(
        update={
            "number": 9,
            "outcome": "over_budget",
            "peak_reserved_bytes": None,
            "samples_per_second": None,
            "predicted_peak_bytes": 64 * 2**30,
        }
    )
    figure = tradeoff(plan.model_copy(update={"trials": (*plan.trials, far)}))
    peaks = [t for t in plan.trials if t.peak_reserved_bytes is not None or t.predicted_peak_bytes is not None]
    assert len(figure.marks) == len(peaks) + 1
    assert [mark.shape for mark in figure.marks].count("star") == 1
    edge = next(mark for mark in figure.marks if mark.says.startswith("9:"))
    assert edge.label == "64.0 GiB →"
    assert edge.x < 2**30


def test_memory_is_stacked_without_gaps() -> None:
    """Each part begins where the one below ends, and the top is the peak."""
    (figure,) = (figure for figure in figures(seen()) if figure.name == "memory-best")
    below = [0.0] * 6
    for area in figure.areas:
        assert [lower for _, lower, _ in area.edges] == below
        below = [upper for _, _, upper in area.edges]
    assert max(below) == 53 * MIB
    assert [span.name for span in figure.spans] == ["forward", "backward", "optimizer"]
    assert figure.lines == ()  # the budget is far above: it would flatten the picture


def test_figures_that_have_nothing_to_show_are_left_out() -> None:
    """No empty pictures."""
    assert [figure.name for figure in figures(seen())] == [
        "tradeoff",
        "memory-best",
        "memory-naive",
        "time",
        "blocks",
    ]
    assert [figure.name for figure in figures(load("forecast"))] == ["tradeoff"]
