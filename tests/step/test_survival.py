"""A step that runs out of memory is not lost."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autofit.candidate import Candidate
from autofit.errors import ConfigError, InfeasibleError, StepError
from autofit.memory import meter_for
from autofit.random_states import SETTLED
from autofit.step import TrainStep
from autofit.step import survival as module
from autofit.step.survival import MicroBatchSizes
from autofit.units import MiB
from tests.models import ConvNet, image_batch
from tests.states import FullState


class Trouble:
    """Raises out of memory at chosen moments, each once: (step, phase, which micro-batch)."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.planned: dict[str, list[int]] = {"forward": [], "backward": [], "optimizer": []}
        self.calls = {"forward": 0, "backward": 0, "optimizer": 0}
        model.register_forward_pre_hook(lambda *_: self._call("forward"))
        model.register_forward_hook(self._watch_backward)
        optimizer.register_step_pre_hook(lambda *_: self._call("optimizer"))

    def _watch_backward(self, _module: Any, _inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: self._call("backward"))

    def _call(self, phase: str) -> None:
        self.calls[phase] += 1
        if self.calls[phase] in self.planned[phase]:
            raise torch.OutOfMemoryError(f"CUDA out of memory, planned in {phase}.")


def start(samples: int = 4, micro: int = 4) -> tuple[ConvNet, torch.optim.Optimizer, TrainStep]:
    torch.manual_seed(0)
    model = ConvNet(width=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    candidate = Candidate(micro_batch_size=micro, accumulation_steps=-(-samples // micro))
    return model, optimizer, TrainStep(model, optimizer, candidate, loss_fn=F.cross_entropy)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([value.double().flatten() for value in model.state_dict().values()])


def test_a_training_with_trouble_ends_like_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 steps with dropout and BatchNorm, and memory that runs out at random moments of every phase.

    The weights and buffers are those of a run that never failed and used the same micro-batches.
    """
    monkeypatch.setattr(module, "PATIENCE", 10)
    batches = [(torch.randn(5, 3, 8, 8), torch.randint(0, 10, (5,))) for _ in range(10)]
    model, optimizer, step = start(5, micro=3)
    trouble = Trouble(model, optimizer)
    dice = random.Random(0)
    for phase, last in (("forward", 600), ("backward", 600), ("optimizer", 200)):
        trouble.planned[phase] = sorted(dice.sample(range(1, last), 12))
    results = [step(batches[number % 10]) for number in range(200)]
    assert {event.phase for event in step.oom_events} == {"forward", "backward", "optimizer"}
    assert len(step.oom_events) >= 24
    assert all(sum(result.micro_batches) == 5 for result in results)

    other, _, calm = start(5, micro=3)
    for number, result in enumerate(results):
        largest = max(result.micro_batches)
        calm.candidate = Candidate(micro_batch_size=largest, accumulation_steps=len(result.micro_batches))
        calm._sizes = MicroBatchSizes(largest)
        assert calm(batches[number % 10]).micro_batches == result.micro_batches
    assert calm.oom_events == []
    assert (weights(model) - weights(other)).norm() <= 1e-6 * weights(other).norm()
    assert trouble.calls["optimizer"] >= 200


def test_a_batch_that_is_suddenly_longer() -> None:
    """G8, G9, G12: under a real cap larger images are trained in smaller micro-batches, and the others are not."""
    model, _, step = start(8, micro=8)
    usual, large = image_batch(8, size=16), image_batch(8, size=96)
    resident = [*model.parameters(), *model.buffers()]
    with meter_for(torch.device("cpu")).metered(cap_bytes=10 * MiB, resident=resident):
        assert step(usual).micro_batches == (8,)
        result = step(large)
        assert sum(result.micro_batches) == 8
        assert max(result.micro_batches) < 8
        events = len(step.oom_events)
        assert events >= 1
        assert step(usual).micro_batches == (8,)
        assert step(large).micro_batches == result.micro_batches
        assert len(step.oom_events) == events


def test_sizes_grow_back_carefully() -> None:
    """Doubled after a stretch without trouble; each further attempt waits twice as long; never above the plan's."""
    sizes = MicroBatchSizes(8)
    a, b = torch.zeros(8, 3), torch.zeros(8, 2)
    assert sizes.ran_out(a, size=8) == 4
    assert sizes.ran_out(a, size=4) == 2
    assert sizes.of(b) == 8
    history = []
    for _ in range(4 * module.PATIENCE):
        sizes.passed(a)
        history.append(sizes.of(torch.zeros(5, 3)))
    assert history.index(4) == module.PATIENCE - 1
    assert history.index(8) == 3 * module.PATIENCE - 1
    assert max(history) == 8
    assert sizes.ran_out(a, size=1) == 1


@pytest.mark.parametrize("late", [False, True])
def test_random_states_of_python_and_numpy_go_back(late: bool) -> None:
    """Also where the model began to use them after they had rested so long that they are read less often."""
    model, optimizer, step = start()
    batch = image_batch()
    if late:
        for _ in range(3 * SETTLED):
            step(batch)
    drawn: list[tuple[float, float]] = []
    model.register_forward_pre_hook(lambda *_: drawn.append((random.random(), float(np.random.rand()))))
    for _ in range(SETTLED if late else 0):
        step(batch)
    trouble = Trouble(model, optimizer)
    trouble.planned["optimizer"] = [1]
    drawn.clear()
    step(batch)
    assert len(step.oom_events) == 1
    assert drawn[0] == drawn[1]


def test_a_single_sample_that_does_not_fit() -> None:
    """At micro-batch 1 it stops with the facts, with model, buffers and random states as at the step's start."""
    model, optimizer, step = start()
    model.register_forward_hook(_out_of_memory)
    before = FullState(model, optimizer)
    with pytest.raises(InfeasibleError, match="micro-batch of one sample") as caught:
        step(image_batch())
    assert [event.smaller_micro_batch_size for event in step.oom_events] == [2, 1, 1, 1]
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert before.differences(model, optimizer) == []


def _out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


class Counting(nn.Module):
    """Buffers of every kind of layout and element, all of which change in forward, then memory runs out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        kinds = {
            "transposed": torch.arange(6.0).view(2, 3).t(),
            "strided": torch.arange(6.0)[::2],
            "scalar": torch.tensor(3),
            "empty": torch.zeros(0, 4),
            "complex": torch.ones(2, 2, dtype=torch.complex64),
            "channels": torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last),
            "flags": torch.tensor([True, False]),
            "large": torch.zeros(module.ALWAYS_COPIED_BYTES // 4 + 1),
        }
        for name, value in kinds.items():
            self.register_buffer(name, value.clone(memory_format=torch.preserve_format))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for buffer in self.buffers():
            buffer.logical_not_() if buffer.dtype == torch.bool else buffer.add_(1)
        return self.linear(x)


@pytest.mark.parametrize("calm_steps", [0, 1])
def test_buffers_of_every_kind_go_back(calm_steps: int) -> None:
    """Also those that no flat copy can hold; the second step copies them another way than the first."""
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(model, optimizer, Candidate(micro_batch_size=4, accumulation_steps=1), loss_fn=F.cross_entropy)
    batch = (torch.randn(4, 3), torch.randint(0, 2, (4,)))
    for _ in range(calm_steps):
        step(batch)
    model.register_forward_hook(_out_of_memory)
    before = FullState(model, optimizer)
    with pytest.raises(InfeasibleError):
        step(batch)
    assert before.differences(model, optimizer) == []
    assert model.get_buffer("transposed").stride() == (1, 3)


def test_what_only_may_be_memory_is_raised_as_it_is_when_nothing_smaller_helps() -> None:
    """A1: cuDNN's words are memory only if a smaller micro-batch passes."""
    model, _, step = start()
    error = RuntimeError("Unable to find a valid cuDNN algorithm to run convolution")

    def fail(*_: Any) -> None:
        raise error

    model.register_forward_hook(fail)
    with pytest.raises(RuntimeError) as caught:
        step(image_batch())
    assert caught.value is error


class HalfDone(torch.optim.SGD):
    """Runs out of memory after it has changed a parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1)
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_an_optimizer_that_stopped_half_way_is_not_repeated() -> None:
    """What was changed cannot be undone, so that is said instead of training on with wrong weights."""
    model = ConvNet(width=4)
    optimizer = HalfDone(model.parameters(), lr=0.1)
    candidate = Candidate(micro_batch_size=4, accumulation_steps=1)
    with pytest.raises(StepError, match="after 1 of"):
        TrainStep(model, optimizer, candidate, loss_fn=F.cross_entropy)(image_batch())


class LateState(torch.optim.AdamW):
    """Runs out of memory once, when it has made the state of its first parameter."""

    failed = False

    def _init_group(self, group: Any, *lists: Any) -> bool:
        if not self.failed:
            self.failed = True
            first = {**group, "params": group["params"][:1]}
            super()._init_group(first, *lists)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super()._init_group(group, *lists)


def test_optimizer_state_half_made_is_made_again() -> None:
    """Memory that runs out while AdamW makes its state, as it does in the first step: the step is run again."""
    results = []
    for kind in (torch.optim.AdamW, LateState):
        torch.manual_seed(0)
        model = ConvNet(width=4).eval()
        optimizer = kind(model.parameters(), lr=1e-2)
        candidate = Candidate(micro_batch_size=2, accumulation_steps=2)
        step = TrainStep(model, optimizer, candidate, loss_fn=F.cross_entropy)
        step(image_batch())
        results.append(weights(model))
    assert len(step.oom_events) == 1
    assert (results[0] - results[1]).norm() <= 1e-6 * results[0].norm()


def test_float16_after_its_gradients_were_unscaled() -> None:
    """A step that fails in the optimizer under float16 unscales once again, from the same scale."""
    model, optimizer, _ = start()
    candidate = Candidate(micro_batch_size=4, accumulation_steps=1, precision="float16")
    step = TrainStep(model, optimizer, candidate, loss_fn=F.cross_entropy, max_grad_norm=1.0)
    trouble = Trouble(model, optimizer)
    trouble.planned["optimizer"] = [1]
    result = step(image_batch())
    assert result.micro_batches == (2, 2)
    assert len(step.oom_events) == 1


def test_evaluation_survives_on_its_own() -> None:
    """Evaluation gives the whole batch's loss in micro-batches of its own, in evaluation mode, and changes nothing."""
    model, optimizer, step = start(8, micro=8)
    step(image_batch(8, size=8))
    batch = image_batch(8, size=8)
    model.eval()
    with torch.no_grad():
        expected = F.cross_entropy(model(batch[0]), batch[1]).item()
    model.train()
    before = FullState(model, optimizer)
    seen: list[int] = []

    def only_small(_module: nn.Module, inputs: Any) -> None:
        seen.append(len(inputs[0]))
        if len(inputs[0]) > 2:
            _out_of_memory()

    handle = model.register_forward_pre_hook(only_small)
    result = step.evaluate(batch)
    handle.remove()
    assert result.micro_batches == (2, 2, 2, 2)
    assert result.loss.item() == pytest.approx(expected, rel=1e-6)
    assert before.differences(model, optimizer) == []
    assert step(batch).micro_batches == (8,)
    assert seen == [8, 4, 2, 2, 2, 2]


class Pooled(nn.Module):
    """BatchNorm over vectors: one sample has no variance."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def pooled(micro: int, samples: int) -> tuple[Pooled, Trouble, TrainStep, Any]:
    torch.manual_seed(0)
    model = Pooled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    candidate = Candidate(micro_batch_size=micro, accumulation_steps=-(-samples // micro))
    step = TrainStep(model, optimizer, candidate, loss_fn=F.cross_entropy)
    trouble = Trouble(model, optimizer)
    return model, trouble, step, (torch.randn(samples, 3, 2, 2), torch.randint(0, 10, (samples,)))


def test_batch_norm_never_gets_one_sample() -> None:
    """Not in the last batch of an epoch, and not when smaller micro-batches are tried."""
    _, trouble, step, batch = pooled(micro=2, samples=8)
    assert step(tuple(part[:5] for part in batch)).micro_batches == (3, 2)
    trouble.planned["forward"] = [trouble.calls["forward"] + 1]
    assert step(batch).micro_batches == (2, 2, 2, 2)
    assert step.oom_events


def test_when_batch_norm_leaves_nothing_smaller_memory_is_named() -> None:
    """Buffers are those of the start, and the error says what ran out."""
    model, trouble, step, batch = pooled(micro=2, samples=4)
    before = weights(model)
    trouble.planned["forward"] = list(range(1, 100))
    with pytest.raises(InfeasibleError, match=r"ran out in forward .* 2 samples, of which BatchNorm needs two"):
        step(batch)
    assert torch.equal(weights(model), before)


def test_what_fails_only_in_smaller_micro_batches_does_not_hide_that_memory_ran_out() -> None:
    """The error names both, and everything is as at the start."""

    class Four(Pooled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) < 4:
                raise ValueError("four at least")
            return super().forward(x)

    torch.manual_seed(0)
    model = Four()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(model, optimizer, Candidate(micro_batch_size=4, accumulation_steps=1), loss_fn=F.cross_entropy)
    Trouble(model, optimizer).planned["backward"] = [1]
    before = weights(model)
    with pytest.raises(StepError, match=r"planned in backward.*micro-batches of 2.*four at least") as caught:
        step((torch.randn(4, 3, 2, 2), torch.randint(0, 10, (4,))))
    assert isinstance(caught.value.__cause__, ValueError)
    assert torch.equal(weights(model), before)


def test_an_optimizer_that_cannot_train_the_model_is_refused() -> None:
    """As tune() refuses it: one of another model, and one that needs a closure."""
    whole = Candidate(micro_batch_size=4, accumulation_steps=1)
    with pytest.raises(ConfigError, match="none of the model's parameters"):
        TrainStep(Pooled(), torch.optim.SGD(Pooled().parameters()), whole)
    model = Pooled()
    with pytest.raises(ConfigError, match="needs a closure"):
        TrainStep(model, torch.optim.LBFGS(model.parameters()), whole)
    with pytest.raises(ConfigError, match="max_grad_norm must be a positive number, got 'x'"):
        TrainStep(model, torch.optim.SGD(model.parameters()), whole, max_grad_norm="x")
