"""One trial: what it measures, how failures are judged, and that nothing is left of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import autofit.trial
from autofit.errors import DeviceLostError
from autofit.memory import Reading
from autofit.plan import Seconds, Trial
from autofit.snapshot import restored
from autofit.stepping import check_gradients
from autofit.trial import TrialSetup, confirm_trial, measure_need, run_trial
from autofit.units import MiB
from autofit.verdict import UnstableError, judge_memory, noise_message, noise_notes
from tests.models import ConvNet, Wide, image_batch, vector_batch
from tests.setups import CPU, candidate, make_setup
from tests.states import FullState


@pytest.fixture
def model() -> ConvNet:
    torch.manual_seed(0)
    return ConvNet()


@pytest.fixture
def setup(model: ConvNet) -> Iterator[TrialSetup]:
    with restored(model, None, device=CPU) as snapshot:
        yield make_setup(model, snapshot)


def test_a_feasible_trial_says_everything(setup: TrialSetup) -> None:
    """C2, H2: bytes and seconds were measured, and the step is composed of what was timed apart."""
    trial = run_trial(candidate(4), setup)
    assert trial.outcome == "feasible"
    assert trial.peak_reserved_bytes is not None
    assert trial.peak_allocated_bytes is not None
    assert 0 < trial.peak_allocated_bytes <= trial.peak_reserved_bytes <= setup.cap_bytes
    assert trial.step_seconds is not None
    assert trial.micro_step_seconds is not None
    assert trial.optimizer_seconds is not None
    composed = 3 * trial.micro_step_seconds + trial.optimizer_seconds
    assert trial.step_seconds.median == pytest.approx(composed, rel=0.5)
    assert trial.samples_per_second == pytest.approx(12 / trial.step_seconds.median)


def test_every_trial_starts_from_the_same_state(model: ConvNet) -> None:
    """D1: a trial steps the optimizer for real, and leaves no trace of it."""
    before = FullState(model)
    with restored(model, None, device=CPU) as snapshot:
        setup = make_setup(model, snapshot)
        for size in (3, 12):
            run_trial(candidate(size), setup)
            assert before.differences(model) == []


@pytest.mark.parametrize(
    ("message", "outcome"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "out_of_memory"),
        ("Unable to find a valid cuDNN algorithm to run convolution", "out_of_memory"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "out_of_memory"),
        ("The size of tensor a (3) must match", "invalid"),
    ],
)
def test_failures_are_judged(setup: TrialSetup, message: str, outcome: str) -> None:
    """A1, A3: what may mean memory makes the search go down; the raw message and the phase are kept."""
    handle = setup.model.register_forward_hook(_raiser(RuntimeError(message)))
    trial = run_trial(candidate(4), setup)
    handle.remove()
    assert trial.outcome == outcome
    assert trial.message == f"forward: RuntimeError: {message}"
    assert run_trial(candidate(4), setup).outcome == "feasible"


def _raiser(error: Exception) -> Any:
    def fail(*_: Any) -> None:
        raise error

    return fail


def test_a_device_that_does_not_answer_any_more(setup: TrialSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A4: out of memory, after which every further call fails: the process is lost, and that is said at once."""
    text = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"
    setup.model.register_forward_hook(_raiser(RuntimeError(text)))
    monkeypatch.setattr(autofit.trial, "synchronize", _raiser(RuntimeError(text)))
    with pytest.raises(DeviceLostError, match="does not answer"):
        run_trial(candidate(4), setup)


def test_a_loss_that_is_not_finite_is_unstable(model: ConvNet) -> None:
    """A candidate whose loss is not finite is never chosen, however fast it is."""
    with restored(model, None, device=CPU) as snapshot:
        setup = make_setup(
            model,
            snapshot,
            loss_options={"loss_fn": lambda output, target: output.sum() * (float("inf") if len(target) > 4 else 1)},
        )
        assert run_trial(candidate(12), setup).outcome == "unstable"
        assert run_trial(candidate(4), setup).outcome == "feasible"


def test_float16_skips_until_its_scale_fits(model: ConvNet) -> None:
    """D10: the optimizer's state is made in the metered steps even though float16 skips its first ones."""
    big = Wide()
    with restored(big, None, device=CPU) as snapshot:
        batch = vector_batch()
        setup = make_setup(big, snapshot, batch=(batch[0] * 200, batch[1]), cap_bytes=256 * MiB)
        weights = sum(parameter.nbytes for parameter in big.parameters())
        trial = run_trial(candidate(4, precision="float16"), setup)
        assert trial.outcome == "feasible", trial.message
        assert trial.peak_allocated_bytes is not None
        assert trial.peak_allocated_bytes > 4 * weights


def test_the_whole_step_is_confirmed(setup: TrialSetup) -> None:
    """C15, B10: the chosen candidate runs again whole; what does not hold there is not feasible any more."""
    trial = run_trial(candidate(1), setup)
    confirmed = confirm_trial(trial, setup)
    assert confirmed.feasible
    assert confirmed.peak_reserved_bytes == trial.peak_reserved_bytes
    calls: list[int] = []

    def late(*_: Any) -> None:
        calls.append(1)
        if len(calls) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    handle = setup.model.register_forward_hook(late)
    failed = confirm_trial(trial, setup)
    handle.remove()
    assert failed.outcome == "out_of_memory"
    assert failed.message.startswith("whole step, forward")


@pytest.mark.parametrize(
    ("peak", "outside", "outcome"),
    [(100, 0, "feasible"), (90, 10, "feasible"), (101, 0, "over_budget"), (95, 6, "over_budget")],
)
def test_judged_by_the_peak(peak: int, outside: int, outcome: str) -> None:
    """G1, G2: the measured peak and what grew outside the allocator decide, not that nothing was raised."""
    reading = Reading(peak_reserved_bytes=peak, peak_allocated_bytes=peak, alloc_retries=0)
    assert judge_memory(reading, cap_bytes=100, outside_bytes=outside)[0] == outcome


def test_the_need_of_what_does_not_fit(setup: TrialSetup) -> None:
    """What a candidate would need is measured without the cap, to say what budget would fit it."""
    need = measure_need(candidate(12), setup, available_bytes=1 << 40)
    assert need is not None
    tight = make_setup(setup.model, setup.snapshot, cap_bytes=need.peak_reserved_bytes - 2 * MiB)
    assert measure_need(candidate(12), tight, available_bytes=1 << 40) == need


def test_many_trials_leave_nothing(setup: TrialSetup) -> None:
    """B3, B8: with half of the trials out of memory, live tensors and objects stay flat."""
    tight = make_setup(setup.model, setup.snapshot, cap_bytes=10 * MiB)
    counts = []
    for number in range(16):
        trial: Trial | None = run_trial(candidate(12 if number % 2 else 2), tight)
        assert trial is not None
        assert trial.outcome == ("out_of_memory" if number % 2 else "feasible"), trial
        trial = None
        gc.collect()
        things = gc.get_objects()
        counts.append((sum(1 for t in things if issubclass(type(t), torch.Tensor)), len(things)))
        del things
    assert len({tensors for tensors, _ in counts[4:]}) == 1
    assert max(objects for _, objects in counts[4:]) - min(objects for _, objects in counts[4:]) < 60


def test_what_cannot_win_any_more_is_dropped(setup: TrialSetup) -> None:
    """A candidate far behind the best so far is `slower` after one round, with what was measured until then."""
    trial = run_trial(candidate(4), setup)
    assert trial.step_seconds is not None
    fast = trial.model_copy(update={"step_seconds": Seconds.of([trial.step_seconds.median / 1000])})
    dropped = run_trial(candidate(3), setup, rival=fast)
    assert dropped.outcome == "slower"
    assert dropped.step_seconds is not None
    assert len(dropped.step_seconds.samples) == 1
    assert dropped.samples_per_second == pytest.approx(12 / dropped.step_seconds.median)
    assert dropped.peak_reserved_bytes == run_trial(candidate(3), setup).peak_reserved_bytes
    assert "cannot win" in dropped.message


def test_a_gradient_that_is_not_finite_is_unstable(model: ConvNet) -> None:
    """The loss is finite, but its slope is not: never chosen, and the parameters are named."""

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - output.detach()).sum().abs().sqrt() + 1

    with restored(model, None, device=CPU) as snapshot:
        trial = run_trial(candidate(12), make_setup(model, snapshot, loss_options={"loss_fn": loss_fn}))
    assert trial.outcome == "unstable"
    assert "the loss is" in trial.message or "gradients of" in trial.message


def test_gradients_are_looked_at(setup: TrialSetup) -> None:
    """One infinite value in one gradient is enough, and its parameter is named; a sound step passes."""
    step = setup.train_step(candidate(4))
    part = step.split(image_batch(12))[0]
    check_gradients(step, part)
    bias = setup.model.get_parameter("head.bias")
    handle = bias.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(UnstableError, match=r"1 parameters \(head.bias\)"):
        check_gradients(step, part)
    handle.remove()
    assert bias.grad is None


@pytest.mark.parametrize(
    ("samples", "noisy"), [([1.0, 1.01, 0.99, 1.0], False), ([1.0, 1.4, 0.7, 1.2], True), ([1.0], False)]
)
def test_times_judge_themselves(samples: list[float], noisy: bool) -> None:
    """A spread above a tenth of the median is said, in the trial and in the plan."""
    times = Seconds.of(samples)
    trial = Trial(number=0, candidate=candidate(4), outcome="feasible", step_seconds=times)
    assert bool(noise_message(times)) == noisy
    notes = noise_notes(trial, [trial])
    assert [note.startswith("Unstable because the machine is noisy") for note in notes] == [True] * noisy
