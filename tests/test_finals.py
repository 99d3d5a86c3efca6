"""The end of a search: who is measured again, who wins, and who falls at the last check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import autofit.finals
from autofit.candidate import Candidate
from autofit.errors import DeviceLostError
from autofit.exactness import Comparison, compare_with_float32
from autofit.finals import TURNS, Finals, close_contenders
from autofit.plan import Seconds, Trial
from autofit.snapshot import restored
from autofit.trial import TrialSetup
from autofit.verdict import UnstableError
from tests.models import ConvNet
from tests.setups import CPU, SAMPLES, candidate, make_setup
from tests.states import FullState


@pytest.fixture
def setup() -> Iterator[TrialSetup]:
    torch.manual_seed(0)
    model = ConvNet()
    with restored(model, None, device=CPU) as snapshot:
        yield make_setup(model, snapshot)


def timed(number: int, size: int, seconds: float, *, spread: float = 0.0, **values: Any) -> Trial:
    """A trial of micro-batches of `size` whose step took `seconds`, with that interquartile range."""
    return Trial.model_validate(
        {
            "number": number,
            "candidate": candidate(size),
            "outcome": "feasible",
            "peak_reserved_bytes": size,
            "step_seconds": Seconds(median=seconds, iqr=spread * seconds, samples=(seconds,)),
            "samples_per_second": SAMPLES / seconds,
            **values,
        }
    )


InTurn = Callable[[dict[int, float]], list[Sequence[Candidate]]]


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> InTurn:
    """Finals in which a micro-batch size takes the seconds given; returns what was measured."""

    def install(seconds: dict[int, float]) -> list[Sequence[Candidate]]:
        calls: list[Sequence[Candidate]] = []

        def measured(setup: TrialSetup, candidates: Sequence[Candidate]) -> list[list[float]]:
            calls.append(candidates)
            return [[seconds[c.micro_batch_size]] * 6 for c in candidates]

        monkeypatch.setattr(autofit.finals, "measure_in_turn", measured)
        return calls

    return install


def test_who_is_close() -> None:
    """What lies within the noise of the fastest, three at most; noisy trials reach further; failures never do."""
    trials = [timed(0, 12, 1.0), timed(1, 6, 1.02), timed(2, 4, 1.2), timed(3, 3, 1.01), timed(4, 2, 1.015)]
    assert [t.number for t in close_contenders(trials)] == [0, 3, 4]
    assert [t.number for t in close_contenders([timed(0, 12, 1.0), timed(1, 6, 1.05)])] == [0]
    assert [t.number for t in close_contenders([timed(0, 12, 1.0), timed(1, 6, 1.05, spread=0.2)])] == [0, 1]
    assert close_contenders([timed(0, 12, 1.0, outcome="slower")]) == []


def test_a_clear_winner_needs_no_finals(setup: TrialSetup, in_turn: InTurn) -> None:
    """Where the difference is larger than the noise nothing is measured again."""
    calls = in_turn({})
    finals = Finals([timed(0, 12, 1.0), timed(1, 6, 1.3)], setup)
    assert finals.winner() == finals.trials[0]
    assert calls == []
    assert finals.notes == []


@pytest.mark.parametrize(
    ("again", "winner"),
    [
        ({12: 1.0, 6: 0.9}, 6),  # the order turns round
        ({12: 0.9, 6: 1.0}, 12),
        ({12: 1.0, 6: 1.001}, 6),  # a tie goes to less memory
    ],
)
def test_finals_decide(setup: TrialSetup, in_turn: InTurn, again: dict[int, float], winner: int) -> None:
    """What was measured in turn replaces what was measured apart, even against a third that is no finalist."""
    calls = in_turn(again)
    finals = Finals([timed(0, 12, 0.5), timed(1, 6, 0.51), timed(2, 4, 0.6)], setup)
    best = finals.winner()
    assert best is not None
    assert best.candidate.micro_batch_size == winner
    assert best.step_seconds is not None
    assert best.samples_per_second == SAMPLES / again[winner]
    assert len(best.step_seconds.samples) == 6
    assert len(calls) == 1
    assert "measured again in turn" in finals.notes[0]


def test_after_the_deadline_there_are_no_finals(setup: TrialSetup, in_turn: InTurn) -> None:
    """A search that ran out of time answers with what it has."""
    calls = in_turn({})
    assert Finals([timed(0, 12, 1.0), timed(1, 6, 1.01)], setup, deadline=0.0).winner() is not None
    assert calls == []


def test_turns_are_taken(setup: TrialSetup) -> None:
    """A B A B A B, and afterwards nothing of it is left."""
    before = FullState(setup.model)
    sizes: list[int] = []
    handle = setup.model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    samples = autofit.finals.measure_in_turn(setup, [candidate(12), candidate(4)])
    handle.remove()
    setup.recover()
    runs = [size for number, size in enumerate(sizes) if number == 0 or size != sizes[number - 1]]
    assert runs == [12, 4] * TURNS
    assert all(len(own) >= TURNS and min(own) > 0 for own in samples)
    assert before.differences(setup.model) == []


def test_finals_that_fail_change_nothing(setup: TrialSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that runs out in the finals leaves the trials as they were, and the confirmation decides."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(autofit.finals, "measure_in_turn", fail)
    trials = [timed(0, 12, 1.0), timed(1, 6, 1.02)]
    finals = Finals(trials, setup)
    assert finals.winner() is not None
    assert finals.trials == trials


def test_a_device_that_is_lost_in_the_finals_ends_it(setup: TrialSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A9: it is never taken for finals that could not be held, even where the device seems to answer."""

    def fail(setup: TrialSetup, candidates: Sequence[Candidate]) -> list[list[float]]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(autofit.finals, "measure_in_turn", fail)
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        Finals([timed(0, 12, 1.0), timed(1, 6, 1.0)], setup).winner()


def test_who_does_not_hold_falls(setup: TrialSetup) -> None:
    """The fastest runs out of memory as a whole step; what was dropped for its sake is measured again and wins."""
    slow = timed(1, 6, 1.5, outcome="slower", predicted_peak_bytes=7)
    calls: list[int] = []

    def late(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        calls.append(len(inputs[0]))
        if calls.count(3) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    setup.model.register_forward_pre_hook(late)
    finals = Finals([timed(0, 3, 1.0), slow], setup)
    best = finals.winner()
    assert best is not None
    assert best.number == 1
    assert best.outcome == "feasible"
    assert best.predicted_peak_bytes == 7
    assert finals.trials[0].outcome == "out_of_memory"


def test_nothing_holds(setup: TrialSetup) -> None:
    """No trial that fits, no winner."""
    assert Finals([timed(0, 12, 1.0, outcome="out_of_memory")], setup).winner() is None


def test_a_precision_is_held_against_float32(setup: TrialSetup) -> None:
    """The losses after a few steps from the same start: none apart in float32 itself, a little in bfloat16."""
    before = FullState(setup.model)
    same = compare_with_float32(candidate(4), setup)
    assert isinstance(same, Comparison)
    assert same.loss == same.float32_loss
    half = compare_with_float32(candidate(4, precision="bfloat16"), setup)
    assert isinstance(half, Comparison)
    assert 0 < half.difference < 0.1
    assert half.float32_loss == same.float32_loss
    assert before.differences(setup.model) == []


def test_the_difference_stands_in_the_plan(setup: TrialSetup) -> None:
    """The chosen precision's note; float32 needs none."""
    bfloat16 = timed(0, 4, 1.0, candidate=candidate(4, precision="bfloat16"))
    finals = Finals([bfloat16], setup)
    assert finals.winner() is not None
    assert "In bfloat16 the loss after 4 steps" in finals.notes[0]


def test_what_does_not_stay_finite_is_not_chosen(setup: TrialSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A precision that fails after a few steps is unstable, and the next trial wins."""

    def compare(*_: Any) -> None:
        raise UnstableError("after 4 steps, the loss is nan in bfloat16")

    monkeypatch.setattr(autofit.finals, "compare_with_float32", compare)
    finals = Finals([timed(0, 4, 1.0, candidate=candidate(4, precision="bfloat16")), timed(1, 12, 1.2)], setup)
    best = finals.winner()
    assert best is not None
    assert best.number == 1
    assert finals.trials[0].outcome == "unstable"


def test_losses_that_cannot_be_compared(setup: TrialSetup) -> None:
    """Where float32 does not run, the note says why; where only the precision goes wrong, it is unstable."""
    broken = make_setup(setup.model, setup.snapshot, loss_options={"loss_fn": lambda output, target: 1 / 0})
    text = compare_with_float32(candidate(4, precision="bfloat16"), broken)
    assert isinstance(text, str)
    assert "could not be compared with float32: ZeroDivisionError" in text

    def overflowing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.float().sum() * (float("inf") if output.dtype == torch.bfloat16 else 1)

    unstable = make_setup(setup.model, setup.snapshot, loss_options={"loss_fn": overflowing})
    with pytest.raises(UnstableError, match="after 4 steps"):
        compare_with_float32(candidate(4, precision="bfloat16"), unstable)
