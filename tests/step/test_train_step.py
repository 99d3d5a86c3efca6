"""The training step: exact targets, the full batch's gradient, precision, clipping, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autofit.candidate import Candidate, Checkpointing
from autofit.errors import ConfigError
from autofit.memory import meter_for
from autofit.step import TrainStep
from tests.states import FullState


class Spy(torch.optim.SGD):
    """SGD that keeps the gradients of its last step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.gradients = [p.grad.clone() for g in self.param_groups for p in g["params"]]
        self.steps = getattr(self, "steps", 0) + 1
        super().step(closure)


def mlp() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, (torch.randn(12, 6), torch.randint(0, 4, (12,)))


def cnn() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 4)
    )
    return model, (torch.randn(12, 3, 8, 8), torch.randint(0, 4, (12,)))


def gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=50, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    ids = torch.randint(0, 50, (12, 10))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}


def candidate(parts: int, samples: int = 12, **values: Any) -> Candidate:
    return Candidate(micro_batch_size=-(-samples // parts), accumulation_steps=parts, **values)


def gradients_of(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def relative_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    flat = [torch.cat([g.flatten().double() for g in gradients]) for gradients in (found, expected)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


PARTS = [1, 2, 3, 4, 5, 7, 12]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("make", [mlp, cnn, gpt2])
def test_accumulated_gradients_are_the_full_batch_s(make: Callable[[], tuple[nn.Module, Any]], parts: int) -> None:
    """E3, E7: for even and uneven splits, to 1e-6 of the gradient's norm; and the loss is the full batch's."""
    torch.manual_seed(0)
    model, batch = make()
    loss_fn = None if isinstance(batch, dict) else F.cross_entropy
    full = model(**batch).loss if loss_fn is None else loss_fn(model(batch[0]), batch[1])
    expected = gradients_of(model, full)
    optimizer = Spy(model.parameters(), lr=0.1)
    result = TrainStep(model, optimizer, candidate(parts), loss_fn=loss_fn)(batch)
    assert relative_error(optimizer.gradients, expected) < 1e-6
    assert result.loss.item() == pytest.approx(full.item(), rel=1e-6)
    assert sum(result.micro_batches) == 12
    assert len(result.micro_batches) == parts


WEIGHTED = {
    "summed": nn.CrossEntropyLoss(reduction="sum"),
    "class weights": nn.CrossEntropyLoss(weight=torch.tensor([0.1, 2.0, 0.7, 5.0])),
    "ignored targets": nn.CrossEntropyLoss(ignore_index=2),
    "functional": partial(F.cross_entropy, ignore_index=0),
}


@pytest.mark.parametrize("parts", [2, 3, 5, 12])
@pytest.mark.parametrize("name", WEIGHTED)
def test_weighted_losses(name: str, parts: int) -> None:
    """E1: sums, class weights and ignored targets, each weighted as the full batch does it; empty parts too."""
    torch.manual_seed(1)
    model, (inputs, targets) = mlp()
    loss_fn = WEIGHTED[name]
    targets[:3] = 2
    expected = gradients_of(model, loss_fn(model(inputs), targets))
    optimizer = Spy(model.parameters(), lr=0.1)
    TrainStep(model, optimizer, candidate(parts), loss_fn=loss_fn)((inputs, targets))
    assert relative_error(optimizer.gradients, expected) < 1e-6


@pytest.mark.parametrize("parts", [2, 3, 5, 12])
def test_token_weighted_loss(parts: int) -> None:
    """E1: labels of uneven length in a causal language model, whose loss is a mean over the tokens that count."""
    torch.manual_seed(2)
    model, batch = gpt2()
    for row, length in enumerate([10, 1, 2, 9, 3, 3, 10, 4, 2, 8, 10, 5]):
        batch["labels"][row, length:] = -100
    expected = gradients_of(model, model(**batch).loss)
    optimizer = Spy(model.parameters(), lr=0.1)
    TrainStep(model, optimizer, candidate(parts))(batch)
    assert relative_error(optimizer.gradients, expected) < 1e-6


def test_a_weight_of_the_users_own() -> None:
    """E1: `loss_weight` gives the share of each micro-batch, whatever the loss is."""
    torch.manual_seed(3)
    model, (inputs, targets) = mlp()
    weights = torch.rand(12)

    def compute(network: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        losses = F.cross_entropy(network(batch["x"]), batch["y"], reduction="none")
        return (losses * batch["w"]).sum() / batch["w"].sum()

    batch = {"x": inputs, "y": targets, "w": weights}
    expected = gradients_of(model, compute(model, batch))
    optimizer = Spy(model.parameters(), lr=0.1)
    TrainStep(model, optimizer, candidate(5), compute_loss=compute, loss_weight=lambda part: part["w"].sum())(batch)
    assert relative_error(optimizer.gradients, expected) < 1e-6


def test_clipping_acts_once_on_the_whole_gradient() -> None:
    """E5: the norm is the full batch's, not that of a part, and the step is clipped to it."""
    torch.manual_seed(4)
    model, batch = mlp()
    expected = gradients_of(model, F.cross_entropy(model(batch[0]), batch[1]))
    norm = torch.cat([g.flatten() for g in expected]).norm()
    optimizer = Spy(model.parameters(), lr=0.1)
    result = TrainStep(model, optimizer, candidate(5), loss_fn=F.cross_entropy, max_grad_norm=0.01)(batch)
    assert result.grad_norm is not None
    assert result.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
    assert torch.cat([g.flatten() for g in optimizer.gradients]).norm().item() == pytest.approx(0.01, rel=1e-3)
    assert optimizer.steps == 1


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_clipping_needs_a_positive_norm(value: float) -> None:
    """A norm that would stop training is refused."""
    model, _ = mlp()
    with pytest.raises(ConfigError, match="max_grad_norm"):
        TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), candidate(1), max_grad_norm=value)


@pytest.mark.parametrize("samples", [1, 5, 11, 13, 30])
def test_a_batch_of_another_size(samples: int) -> None:
    """The last batch of an epoch is split within the micro-batch, and its gradient is its own full gradient."""
    torch.manual_seed(5)
    model, _ = mlp()
    batch = (torch.randn(samples, 6), torch.randint(0, 4, (samples,)))
    expected = gradients_of(model, F.cross_entropy(model(batch[0]), batch[1]))
    optimizer = Spy(model.parameters(), lr=0.1)
    step = TrainStep(model, optimizer, candidate(3), loss_fn=F.cross_entropy)
    step(mlp()[1])
    model.zero_grad()
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), optimizer.gradients, strict=True):
            parameter.add_(gradient, alpha=0.1)  # back to where it was, up to rounding
    result = step(batch)
    assert max(result.micro_batches) <= 4
    assert sum(result.micro_batches) == samples
    assert relative_error(optimizer.gradients, expected) < 1e-5


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_mixed_precision(precision: Any) -> None:
    """Products run in the lower precision, gradients stay float32 and near the exact ones; one step, one update."""
    torch.manual_seed(6)
    model, batch = mlp()
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda _m, _i, output: seen.append(output.dtype))
    expected = gradients_of(model, F.cross_entropy(model(batch[0]), batch[1]))
    seen.clear()
    optimizer = Spy(model.parameters(), lr=0.1)
    step = TrainStep(model, optimizer, candidate(3, precision=precision), loss_fn=F.cross_entropy)
    before = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
    step(batch)
    assert set(seen) == {getattr(torch, precision)}
    assert {g.dtype for g in optimizer.gradients} == {torch.float32}
    assert relative_error(optimizer.gradients, expected) < 0.02
    assert optimizer.steps == 1
    assert (torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")) == before


def test_float16_unscales_before_clipping_and_skips_overflow() -> None:
    """D10: the norm is that of the true gradient; a step whose gradients overflow is skipped and the scale halved."""
    torch.manual_seed(7)
    model, batch = mlp()
    expected = gradients_of(model, F.cross_entropy(model(batch[0]), batch[1]))
    norm = torch.cat([g.flatten() for g in expected]).norm()
    optimizer = Spy(model.parameters(), lr=0.1)
    step = TrainStep(model, optimizer, candidate(3, precision="float16"), loss_fn=F.cross_entropy, max_grad_norm=100.0)
    result = step(batch)
    assert result.grad_norm is not None
    assert result.grad_norm.item() == pytest.approx(norm.item(), rel=0.02)
    assert step.scaler is not None
    state = step.state_dict()
    weights = model[0].weight.detach().clone()
    step((batch[0] * 1e4, batch[1]))
    assert step.scaler.get_scale() == state["scaler"]["scale"] / 2
    assert torch.equal(model[0].weight, weights)
    step.load_state_dict(state)
    assert step.scaler.get_scale() == state["scaler"]["scale"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_nothing_is_left_on_the_model(precision: Any) -> None:
    """After a call no gradient, no patched attribute, no hook and no switch of ours remains."""
    torch.manual_seed(8)
    model, batch = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    full = candidate(3, precision=precision, checkpointing=Checkpointing(mode="full"))
    step = TrainStep(model, optimizer, full, loss_fn=F.cross_entropy)
    before = FullState(model, optimizer)
    step(batch)
    assert before.differences(model, optimizer) == []


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_a_failed_step_leaves_no_partial_gradients(phase: str) -> None:
    """B6: what an error of the user's own leaves is no partial gradient and no patch; the next step is a clean one."""
    torch.manual_seed(9)
    model, batch = mlp()
    expected = gradients_of(model, F.cross_entropy(model(batch[0]), batch[1]))
    optimizer = Spy(model.parameters(), lr=0.1)
    recomputed = Checkpointing(mode="full", blocks=("0",))
    step = TrainStep(model, optimizer, candidate(3, checkpointing=recomputed), loss_fn=F.cross_entropy)
    calls: list[int] = []

    def fail_on_second(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError(phase)

    if phase == "forward":
        handle: Any = model[2].register_forward_hook(fail_on_second)
    elif phase == "backward":
        handle = model[2].register_full_backward_hook(fail_on_second)
    else:
        calls.append(1)
        handle = optimizer.register_step_pre_hook(fail_on_second)
    with pytest.raises(KeyError, match=phase):
        step(batch)
    handle.remove()
    assert step.phase == phase
    assert step.oom_events == []
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "forward" not in vars(model[0])
    step(batch)
    assert relative_error(optimizer.gradients, expected) < 1e-6


@pytest.mark.parametrize("counted", [True, False])
def test_where_memory_is_counted_a_micro_batch_costs_its_bytes(counted: bool) -> None:
    """Under the meter of the host it is a copy, as a transfer would make it; otherwise nothing is copied."""
    model, batch = mlp()
    pointers: list[int] = []
    model.register_forward_pre_hook(lambda _m, inputs: pointers.append(inputs[0].untyped_storage().data_ptr()))
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), candidate(4), loss_fn=F.cross_entropy)
    with meter_for(torch.device("cpu")).metered(cap_bytes=None, resident=()) if counted else nullcontext():
        step(batch)
    assert len(pointers) == 4
    assert all((pointer == batch[0].untyped_storage().data_ptr()) is not counted for pointer in pointers)
