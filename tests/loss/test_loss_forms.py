"""How the model is called, and what counts as its loss."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from autofit.errors import ConfigError
from autofit.loss import resolve_loss


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Graphs:
    x: Any


class Returns(nn.Module):
    """A model that returns what `make(weight, args, kwargs)` says, and remembers how it was called."""

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.make = make
        self.called: tuple[Any, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.called = (len(args), sorted(kwargs))
        return self.make(self.weight, *args, **kwargs)


def scaled(weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return weight * sum(value.sum() for value in (*args, *kwargs.values()))


def carrying(weight: torch.Tensor, **kwargs: Any) -> Any:
    """A model output with the loss as an attribute, as transformers have it."""

    @dataclass
    class Output:
        loss: Any
        logits: Any = None

    return Output(weight * 3)


x, y = torch.ones(4, 3), torch.arange(4.0)

CALLS = {
    "tuple": ((x, x, y), scaled, F.mse_loss, (2, []), lambda: F.mse_loss(torch.tensor(48.0).expand(4), y)),
    "list": ([x, y], lambda w, x: w * x[:, 0], F.mse_loss, (1, []), lambda: F.mse_loss(torch.full((4,), 2.0), y)),
    "namedtuple": (Pair(x, y), lambda w, x: w * x[:, 0], F.l1_loss, (1, []), lambda: F.l1_loss(torch.tensor(2.0), y)),
    "dict": ({"a": x, "labels": y}, lambda w, a: w * a[:, 0], F.mse_loss, (0, ["a"]), None),
    "dict with y": (UserDict({"a": x, "y": y}), lambda w, a: w * a[:, 0], F.mse_loss, (0, ["a"]), None),
}


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.parametrize(("batch", "make", "loss_fn", "called", "expected"), CALLS.values(), ids=CALLS)
def test_loss_fn_is_given_output_and_target(
    batch: Any, make: Any, loss_fn: Any, called: Any, expected: Callable[[], torch.Tensor] | None
) -> None:
    """The model gets everything but the target; loss_fn gets its output and the target."""
    seen_targets = []

    def recording(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen_targets.append(target)
        return loss_fn(output.expand(4), target)

    model = Returns(make)
    loss = resolve_loss(loss_fn=recording)(model, batch)
    assert model.called == called
    assert seen_targets[0] is y
    torch.testing.assert_close(loss, expected() if expected else F.mse_loss(torch.full((4,), 2.0), y))


OWN_LOSSES = {
    "tensor": (x, scaled, (1, []), 24.0),
    "one element": (x, lambda w, x: w.reshape(1, 1), (1, []), 2.0),
    "tuple of one": ((x,), scaled, (1, []), 24.0),
    "packed": (pack_sequence([x]), lambda w, p: w * p.data.sum(), (1, []), 24.0),
    "dataclass": (Graphs(x), lambda w, g: w * g.x.sum(), (1, []), 24.0),
    "list of samples": ([{"x": x}, {"x": x}], lambda w, samples: w * len(samples), (1, []), 4.0),
    "dict, .loss": ({"a": x, "labels": y}, carrying, (0, ["a", "labels"]), 6.0),
    "dict, ['loss']": ({"a": x}, lambda w, a: {"loss": w, "logits": a}, (0, ["a"]), 2.0),
    "dict of losses": (([x], [{"b": x}]), lambda w, x, t: {"box": w, "class": w * 2}, (2, []), 6.0),
    "losses of one element": (({"a": x}), lambda w, a: {"box": w.reshape(1), "class": w}, (0, ["a"]), 4.0),
    "tuple and .loss": ((x, y), lambda w, x: carrying(w), (1, []), 6.0),
}


@pytest.mark.parametrize(("batch", "make", "called", "expected"), OWN_LOSSES.values(), ids=OWN_LOSSES)
def test_the_model_may_give_the_loss_itself(batch: Any, make: Any, called: Any, expected: float) -> None:
    """A tensor of one element, .loss, ["loss"], or a dict of losses, which are summed."""
    model = Returns(make)
    loss = resolve_loss()(model, batch)
    assert (model.called, loss.shape, loss.item()) == (called, (), expected)


def test_compute_loss_takes_over_entirely() -> None:
    """It is given the model and the batch, whatever that is."""
    model, batch = Returns(scaled), "anything"
    loss = resolve_loss(compute_loss=lambda m, b: m.weight * len(b))(model, batch)
    assert loss.item() == 16.0
    assert model.called == ()


NO_LOSS = {
    "vector": (x, lambda w, x: w * x, None, ["model(batch) returned a tensor of shape (4, 3)", "compute_loss"]),
    "no labels": ({"a": x}, lambda w, a: type("Output", (), {"loss": None})(), None, ["Its .loss is None"]),
    "logits only": ({"a": x}, lambda w, a: {"logits": w * a}, None, ["a dict with keys logits", "loss_fn"]),
    "tuple": (x, lambda w, x: (w * x, x), None, ["a tuple of 2 (Tensor, Tensor)"]),
    "nothing": (x, lambda w, x: None, None, ["a NoneType"]),
    "a metric among losses": (x, lambda w, x: {"a": w, "acc": w.detach()}, None, ["acc require no grad", "metrics"]),
    "empty dict": (x, lambda w, x: {}, None, ["keys (none)"]),
    "number": ((x, y), scaled, lambda out, t: out.item(), ["loss_fn returned a float", ".item()"]),
    "unreduced": ((x, y), scaled, lambda out, t: out * t, ["a loss of shape (4,)", ".mean()"]),
    "integer": ((x, y), scaled, lambda out, t: out.long(), ["dtype torch.int64"]),
    "detached": ((x, y), scaled, lambda out, t: out.detach(), ["does not require grad", "detach()"]),
    "no target in a tensor": (x, scaled, F.mse_loss, ["needs a target", "a tensor of shape (4, 3)"]),
    "no target in a tuple": ((x,), scaled, F.mse_loss, ["needs a target", "a tuple of 1"]),
    "no target in a dataclass": (Graphs(x), scaled, F.mse_loss, ["needs a target", "a Graphs"]),
    "no target in a dict": ({"a": x}, scaled, F.mse_loss, ["exactly one target", "none of them (keys: a)"]),
    "two targets": ({"y": y, "labels": y}, scaled, F.mse_loss, ["exactly one target", "labels, y"]),
}


@pytest.mark.parametrize(("batch", "make", "loss_fn", "said"), NO_LOSS.values(), ids=NO_LOSS)
def test_what_is_no_loss_is_refused(batch: Any, make: Any, loss_fn: Any, said: list[str]) -> None:
    """The error says what was returned, what is allowed and what to pass."""
    with pytest.raises(ConfigError) as caught:
        resolve_loss(loss_fn=loss_fn)(Returns(make), batch)
    for words in said:
        assert words in str(caught.value)


def test_compute_loss_is_named_when_its_loss_is_none() -> None:
    """The user finds the function that is to blame."""
    with pytest.raises(ConfigError, match="compute_loss returned a float"):
        resolve_loss(compute_loss=lambda model, batch: 1.0)(Returns(scaled), x)


def test_a_loss_without_gradient_is_fine_where_none_is_wanted() -> None:
    """Under no_grad nothing requires grad."""
    with torch.no_grad():
        assert resolve_loss()(Returns(scaled), x).item() == 24.0


def test_a_loss_that_is_not_finite_passes() -> None:
    """Looking at the value would wait for the device; that is left to the caller."""
    assert resolve_loss()(Returns(lambda w, x: w / 0), x).isinf()


IMPOSSIBLE = {
    "both": ({"loss_fn": F.mse_loss, "compute_loss": scaled}, "Both loss_fn and compute_loss"),
    "a name": ({"loss_fn": "mse"}, "loss_fn must be callable, got a str"),
    "a tensor": ({"compute_loss": x}, "compute_loss must be callable, got a tensor"),
    "a class": ({"loss_fn": nn.MSELoss}, r"loss_fn is the class MSELoss; pass an instance, MSELoss\(\)"),
}


@pytest.mark.parametrize(("arguments", "said"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_arguments_that_cannot_be_meant(arguments: dict[str, Any], said: str) -> None:
    """Refused before the model runs."""
    with pytest.raises(ConfigError, match=said):
        resolve_loss(**arguments)
