"""A training step while things fail in it: it happens as a whole, or not at all, or says that it was torn."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from autofit.candidate import Candidate, Checkpointing
from autofit.errors import StepError
from autofit.step import TrainStep
from tests.faults import tally
from tests.faults.injectors import ERRORS, PLACES, Fault, spread
from tests.faults.subjects import SUBJECTS
from tests.faults.surroundings import Surroundings
from tests.faults.test_tune_faults import silent_logs
from tests.states import FullState

pytestmark = pytest.mark.usefixtures("frozen_heap")

CANDIDATES = {
    "plain": Candidate(micro_batch_size=2, accumulation_steps=2),
    "float16 recomputed": Candidate(
        micro_batch_size=2, accumulation_steps=2, precision="float16", checkpointing=Checkpointing(mode="full")
    ),
    "bfloat16 selective": Candidate(
        micro_batch_size=1, accumulation_steps=4, precision="bfloat16", checkpointing=Checkpointing(mode="selective")
    ),
}
FAULTS = {
    "operator": ("memory", "host memory", "runtime", "interrupt", "exit"),
    "optimizer": ("memory", "runtime", "interrupt"),
    "line": ("signal",),
}
CASES = [(place, error) for place, errors in FAULTS.items() for error in errors]


class Training:
    """A model that has been trained for two steps of `candidate`, about to take the third."""

    def __init__(self, subject: str, candidate: Candidate) -> None:
        self.model, self.optimizer, self.batch = SUBJECTS[subject]()
        self.optimizer.zero_grad()
        self.step = TrainStep(self.model, self.optimizer, candidate)
        for _ in range(2):
            self.step(self.batch)

    def values(self) -> list[Any]:
        """Parameters, buffers, the optimizer's state and torch's random state."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.parameters(), *self.model.buffers(), *states, torch.get_rng_state()]
        return [tensor.tolist() for tensor in tensors]


def after_step(subject: str, candidate: Candidate, sizes: tuple[int, ...] | None) -> list[Any]:
    """The values after an undisturbed third step, in micro-batches of these sizes."""
    training = Training(subject, candidate)
    if sizes is not None:
        training.step._sizes._largest = max(sizes)
    training.step(training.batch)
    return training.values()


def disturb(subject: str, candidate: Candidate, place: str, fault: Fault) -> str:
    """How the third step ended; fails where it was neither done, nor undone, nor said to be torn."""
    training = Training(subject, candidate)
    before, around = FullState(training.model, training.optimizer), Surroundings()
    sizes, torn, ended = None, False, "step"
    try:
        with PLACES[place](fault):
            sizes = training.step(training.batch).micro_batches
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        error.__traceback__ = None
        ended = type(error).__name__
        torn = isinstance(error, StepError) or "was stopped after" in " ".join(getattr(error, "__notes__", ()))
        del error
    differences = before.differences(training.model, training.optimizer)
    left = [difference for difference in around.differences() if not difference.startswith("live tensors")]
    assert not left, f"{place} {fault.at} -> {ended}: {left[:5]}"
    assert all(parameter.grad is None for parameter in training.model.parameters())
    assert not any("forward" in vars(module) for module in training.model.modules())
    if ended == "step" or (differences and not torn):  # an interrupt may come when all is done
        assert training.values() == after_step(subject, candidate, sizes), f"{place} {fault.at} -> {ended}"
        return "step"
    return "step said to be torn" if torn else f"step undone, {ended}"


def sweep(subject: str, candidate: Candidate, place: str, error: str, points: int) -> None:
    """Lets `error` strike at so many points of one step, spread over all that it has."""
    counting = Fault()
    with silent_logs():
        disturb(subject, candidate, place, counting)
        for at in spread(counting.seen, points):
            fault = Fault(ERRORS[error], at=at)
            ended = disturb(subject, candidate, place, fault)
            assert fault.struck
            tally.ENDED[ended] += 1


@pytest.mark.parametrize(("place", "error"), CASES)
def test_a_few_faults(place: str, error: str) -> None:
    """Every kind of fault, at a few points, under the candidate with the most that can be left behind."""
    sweep("conv", CANDIDATES["float16 recomputed"], place, error, 8)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("name", CANDIDATES)
@pytest.mark.parametrize(("place", "error"), CASES)
def test_faults_everywhere(subject: str, name: str, place: str, error: str) -> None:
    """Every kind of fault at many points."""
    sweep(subject, CANDIDATES[name], place, error, 60)


@pytest.mark.parametrize("error", ["runtime", "interrupt"])
def test_a_failed_backward_holds_nothing(error: str) -> None:
    """What torch's engine keeps of a backward that raised is let go of, without another step."""
    training = Training("conv", CANDIDATES["plain"])
    counting = Fault()
    with PLACES["operator"](counting):
        training.step(training.batch)
    for at in spread(counting.seen, 20):
        gc.collect()
        around = {id(thing) for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)}
        with (
            pytest.raises((RuntimeError, KeyboardInterrupt)) as caught,
            PLACES["operator"](Fault(ERRORS[error], at=at)),
        ):
            training.step(training.batch)
        caught.value.__traceback__ = None
        del caught
        gc.collect()
        left = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and id(t) not in around]
        assert all(tensor.dtype == torch.uint8 for tensor in left), at  # random states of the step's start
        del left


def test_memory_that_runs_out_before_the_forward_is_survived() -> None:
    """The second step and later: the phase of the step before is not taken for that of this one."""
    training = Training("conv", CANDIDATES["plain"])
    transferred = training.step._transferred
    calls: list[int] = []

    def run_out_once(batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return transferred(batch)

    training.step._transferred = run_out_once  # type: ignore[method-assign]
    assert training.step(training.batch).micro_batches == (1, 1, 1, 1)
    assert training.step.oom_events[-1].phase == "forward"
