"""Everything that tuning touches is put back, bit for bit."""

from __future__ import annotations

import random
from collections import deque
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autofit.errors import RestoreError
from autofit.snapshot import Snapshot, restored
from tests.states import FullState

CPU = torch.device("cpu")


class Net(nn.Module):
    """Convolution, BatchNorm, dropout, tied weights, and attributes that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten())
        self.head = nn.Linear(4 * 6 * 6, 5)
        self.tied = nn.Linear(4 * 6 * 6, 5)
        self.tied.weight = self.head.weight
        self.calls = 0
        self.history: list[int] = []
        self.recent: deque[int] = deque(maxlen=2)
        self.memory = torch.zeros(3)
        self.generator = torch.Generator().manual_seed(1)
        self.register_buffer("expanded", torch.ones(1).expand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(self.calls)
        self.recent.append(self.calls)
        self.memory += 1
        noise = torch.rand(5, generator=self.generator)
        features = self.body(x)
        return self.head(features) + self.tied(features) + noise


def trained() -> tuple[Net, torch.optim.Optimizer]:
    """A model in the middle of training: optimizer state and gradients are there."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer)
    model(torch.randn(4, 3, 8, 8)).sum().backward()
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    """Loss of a few steps on random data."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 3, 8, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def disturb(model: Net, optimizer: torch.optim.Optimizer) -> None:
    """Changes everything that a step, or a careless model, can change."""
    train(model, optimizer)
    model.eval()
    model.body[1].running_mean = torch.full((4,), 7.0)
    model.head.weight.data = torch.zeros(1, 1)
    model.extra = "left here"  # type: ignore[assignment]
    model.body.forward = lambda x: x  # type: ignore[method-assign]
    model.head.register_forward_hook(lambda *_: None)
    model.head.weight.requires_grad_(False)
    optimizer.param_groups[0]["lr"] = 5.0
    optimizer.state.clear()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.backends.cudnn.benchmark = True
    random.random()
    np.random.rand()


def test_everything_is_put_back() -> None:
    """B4, D1, D4, D6: weights, buffers, gradients, modes, attributes, optimizer, random states and switches."""
    model, optimizer = trained()
    before = FullState(model, optimizer)
    with restored(model, optimizer, device=CPU):
        disturb(model, optimizer)
        assert before.differences(model, optimizer)
    assert before.differences(model, optimizer) == []


def test_the_same_objects_stay() -> None:
    """Parameters, gradients and their storages are the very same, so that whoever holds them still does."""
    model, optimizer = trained()
    gradient, weight = model.head.weight.grad, model.head.weight
    pointers = (gradient.data_ptr(), weight.data_ptr())  # type: ignore[union-attr]
    with restored(model, optimizer, device=CPU):
        disturb(model, optimizer)
    assert model.head.weight is weight
    assert model.tied.weight is weight
    assert weight.grad is gradient
    assert weight.data_ptr() == pointers[1]


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt(), SystemExit(3)])
def test_put_back_whatever_is_raised(error: BaseException) -> None:
    """D7: an error or an interrupt comes out as it is, after everything was put back."""
    model, optimizer = trained()
    before = FullState(model, optimizer)

    def fail() -> None:
        with restored(model, optimizer, device=CPU):
            disturb(model, optimizer)
            raise error

    with pytest.raises(type(error)) as caught:
        fail()
    assert caught.value is error
    assert before.differences(model, optimizer) == []


def test_rewinding_starts_every_trial_from_the_same_state() -> None:
    """Between trials the values go back and gradients away; at the end the gradients come back too."""
    model, optimizer = trained()
    before = FullState(model, optimizer)
    with restored(model, optimizer, device=CPU) as snapshot:
        runs = []
        for _ in range(3):
            runs.append(train(model, optimizer))
            snapshot.rewind()
            assert all(parameter.grad is None for parameter in model.parameters())
        assert runs[0] == runs[1] == runs[2]
    assert before.differences(model, optimizer) == []


def test_gradients_take_no_memory_meanwhile() -> None:
    """The user's gradients are on the host while tuning: their storage on the tuned device is given up."""
    model, optimizer = trained()
    gradient = model.head.weight.grad
    assert gradient is not None
    with restored(model, optimizer, device=CPU):
        assert gradient.untyped_storage().nbytes() == 0
    assert gradient.untyped_storage().nbytes() == gradient.nbytes


def test_host_memory_is_one_copy() -> None:
    """Tied weights and views are copied once: no deep copy of the model."""
    model, optimizer = trained()
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    snapshot = Snapshot(model, optimizer, device=CPU)
    weights = sum(t.nbytes for t in {id(p): p for p in model.parameters()}.values())
    moments = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    buffers = sum(b.untyped_storage().nbytes() for b in model.buffers()) + model.memory.nbytes
    assert snapshot.host_bytes == weights + moments + buffers + gradients
    snapshot.restore()


def test_what_cannot_be_put_back_is_named() -> None:
    """A RestoreError names the part, and every other part is put back all the same."""
    model, optimizer = trained()
    before = FullState(model, optimizer)
    state = model.generator

    class Stubborn(torch.Generator):
        def set_state(self, new_state: torch.Tensor) -> Any:
            raise RuntimeError("no")

    model.generator = Stubborn()
    with pytest.raises(RestoreError, match="attributes") as caught, restored(model, optimizer, device=CPU):
        train(model, optimizer)
    assert "attributes" in caught.value.state[0]
    model.generator = state
    assert [name for name in before.differences(model, optimizer) if name.startswith(("weights", "gradients"))] == []


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    steps=st.integers(0, 3),
    interrupted=st.booleans(),
    optimizer_kind=st.sampled_from(["SGD", "AdamW"]),
)
def test_restoring_is_bit_identical(seed: int, steps: int, interrupted: bool, optimizer_kind: str) -> None:
    """Whatever was trained in between, and wherever it stopped."""
    torch.manual_seed(seed)
    model = Net()
    optimizer = getattr(torch.optim, optimizer_kind)(model.parameters(), lr=1e-2)
    train(model, optimizer, steps=seed % 2)
    before = FullState(model, optimizer)
    try:
        with restored(model, optimizer, device=CPU):
            train(model, optimizer, steps)
            if interrupted:
                model(torch.randn(4, 3, 8, 8)).sum().backward()
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert before.differences(model, optimizer) == []


def test_subclasses_and_sparse_gradients() -> None:
    """Tensors that wrap others, and sparse gradients, are put back too."""
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    gradient = model.weight.grad
    weight = model.weight.detach().clone()
    with restored(model, optimizer, device=CPU):
        optimizer.zero_grad()
        model(torch.tensor([3])).sum().backward()
        optimizer.step()
    assert model.weight.grad is gradient
    assert torch.equal(model.weight, weight)


class Counter:
    """A helper of the model's own: no module, with state of its own."""

    def __init__(self) -> None:
        self.calls = 0
        self.seen = torch.zeros(2)
        self.inner = [{"last": None}]


class Eccentric(Net):
    """Keeps state in all the places that are not tensors of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()
        self.array = np.zeros(3)
        self.numbers = np.random.default_rng(0)
        self.older_numbers = np.random.RandomState(0)
        self.dice = random.Random(0)
        self.log = bytearray(b"start")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counter.calls += 1
        self.counter.seen += 1
        self.counter.inner[0]["last"] = x.sum().item()
        self.array += self.numbers.random() + self.older_numbers.rand() + self.dice.random()
        self.log += b"."
        return super().forward(x)

    def state(self) -> tuple[Any, ...]:
        counter = self.counter
        states = str(self.numbers.bit_generator.state), str(self.older_numbers.get_state()), self.dice.getstate()
        helper = counter.calls, counter.seen.tolist(), counter.inner[0]["last"]
        return (*helper, self.array.tolist(), *states, bytes(self.log))


class Memorising(nn.CrossEntropyLoss):
    """A loss with a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = super().forward(scores, target)
        self.mean.mul_(0.9).add_(loss.detach())
        return loss * self.scale


def test_what_is_neither_a_tensor_nor_a_module_is_put_back() -> None:
    """Helpers, arrays, generators and buffers of bytes, in place."""
    model = Eccentric()
    model(torch.randn(2, 3, 8, 8))
    before, objects = model.state(), (model.counter, model.counter.inner, model.array, model.log, model.numbers)
    with restored(model, None, device=CPU):
        for _ in range(3):
            model(torch.randn(2, 3, 8, 8))
        model.log[:] = b""
        model.counter.inner.append({"last": 0})
        assert model.state() != before
    assert model.state() == before
    now = model.counter, model.counter.inner, model.array, model.log, model.numbers
    assert all(a is b for a, b in zip(now, objects, strict=True))


@pytest.mark.parametrize("wrap", [lambda loss: loss, lambda loss: loss.forward, lambda loss: partial(loss)])
def test_a_loss_with_a_state_is_put_back(wrap: Any) -> None:
    """Buffers, parameters, gradients, training mode."""
    model, loss = nn.Linear(4, 3), Memorising()
    loss(model(torch.randn(2, 4)), torch.tensor([0, 1])).backward()
    before = FullState(loss)
    with restored(model, None, device=CPU, beside=(wrap(loss), None)):
        loss.eval()
        loss(model(torch.randn(2, 4)), torch.tensor([0, 1])).backward()
        loss.mean.add_(1)
    assert before.differences(loss) == []
