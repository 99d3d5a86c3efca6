"""Every size from two traces."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autofit.predict import UntraceableError
from autofit.predict.line import Line
from autofit.predict.recorder import Trace


class Traces:
    """Makes traces with the sizes of given functions of the samples, and counts how many were made."""

    def __init__(self, *sizes: Callable[[int], int], marks: tuple[tuple[int, str], ...] = ()) -> None:
        self.sizes = sizes
        self.marks = marks
        self.made: list[int] = []

    def __call__(self, samples: int) -> Trace:
        self.made.append(samples)
        return Trace(
            events=list(range(len(self.sizes))),
            sizes=[size(samples) for size in self.sizes],
            categories=["temporary"] * len(self.sizes),
            marks=list(self.marks),
        )


def test_affine_sizes_take_no_further_trace() -> None:
    """However many sizes are asked for."""
    traces = Traces(lambda n: 100, lambda n: 12 * n + 4)
    line = Line(traces)
    assert [line.at(n, n).sizes for n in (1, 7, 1000)] == [[100, 16], [100, 88], [100, 12004]]
    assert len(traces.made) <= 3
    assert line.notes == ()


@pytest.mark.parametrize("size", [lambda n: n * n, lambda n: 4 * (n // 2)], ids=["quadratic", "stepped"])
def test_other_sizes_are_traced_each_by_itself(size: Callable[[int], int]) -> None:
    """A loss over all pairs of samples grows with their square; the line says so and stays right."""
    traces = Traces(size)
    line = Line(traces)
    assert [line.at(n, n).sizes for n in (10, 20, 10)] == [[size(10)], [size(20)], [size(10)]]
    assert traces.made.count(10) == 1
    assert "not proportional" in line.notes[0]


def test_the_second_micro_batch_may_be_smaller() -> None:
    """What is born in it has its own number of samples."""
    traces = Traces(lambda n: 8 * n, lambda n: 8 * n, lambda n: 8 * n, marks=((0, "micro 0"), (1, "micro 1"), (2, "x")))
    assert Line(traces).at(10, 9).sizes == [80, 72, 80]


def test_a_step_that_cannot_be_traced_is_tried_twice_at_most() -> None:
    """Once for the line and once for the size that was asked for; then the answer is known."""
    made: list[int] = []

    def trace(samples: int) -> Trace:
        made.append(samples)
        raise UntraceableError("no", operator="aten::nonzero")

    line = Line(trace)
    for samples in (4, 6, 8):
        with pytest.raises(UntraceableError, match="no"):
            line.at(samples, samples)
    assert made == [3, 4]


def test_sizes_that_only_the_line_cannot_do() -> None:
    """Pairs need an even number of samples: 3 fails, 4 does not."""

    def trace(samples: int) -> Trace:
        if samples % 2:
            raise UntraceableError("odd")
        return Trace(events=[0], sizes=[samples], categories=["temporary"])

    assert Line(trace).at(4, 4).sizes == [4]
