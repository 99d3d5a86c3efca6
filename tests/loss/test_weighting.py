"""Factors of micro-batches: factors times losses are the loss of the whole batch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchvision.models.segmentation.fcn import FCN

from autofit.batch import infer_layout
from autofit.errors import ConfigError
from autofit.loss import Weighting, resolve_loss, resolve_weighting

torch.manual_seed(0)
model = nn.Linear(4, 3)
x = torch.randn(7, 4)
ignored = torch.tensor([0, -100, -100, 2, 1, -100, 1])
classes = ignored.where(ignored >= 0, 2)
probabilities = torch.cat([torch.eye(3), torch.rand(4, 3).softmax(1)])
class_weights = torch.tensor([0.2, 1.0, 3.0])
log_model = nn.Sequential(model, nn.LogSoftmax(1))


def difference(batch: Any, sizes: list[int], *, own: nn.Module = model, weight: Any = None, **options: Any) -> float:
    """How far the weighted sum over parts lies from the loss of the whole batch, as a share of it."""
    loss = resolve_loss(**options)
    weighting = resolve_weighting(batch, model=own, loss_weight=weight, **options)
    parts = infer_layout(batch).split(batch, sizes)
    factors = weighting.coefficients(parts, sizes)
    with torch.no_grad():
        total = sum(factor * loss(own, part).item() for factor, part in zip(factors, parts, strict=True) if factor)
        whole = loss(own, batch).item()
        return abs(total - whole) / abs(whole)


EXACT: dict[str, tuple[Any, dict[str, Any]]] = {
    "default cross-entropy": (ignored, {}),
    "default squared error": (torch.randn(7, 3), {}),
    "mean": (torch.randn(7, 3), {"loss_fn": nn.MSELoss()}),
    "sum": (torch.randn(7, 3), {"loss_fn": nn.SmoothL1Loss(reduction="sum")}),
    "summed function": (torch.randn(7, 3), {"loss_fn": partial(F.mse_loss, reduction="sum")}),
    "binary": (torch.rand(7, 3), {"loss_fn": nn.BCEWithLogitsLoss(pos_weight=class_weights)}),
    "batchmean": (torch.rand(7, 3), {"loss_fn": nn.KLDivLoss(reduction="batchmean"), "own": log_model}),
    "cross-entropy": (ignored, {"loss_fn": nn.CrossEntropyLoss()}),
    "cross-entropy, summed": (ignored, {"loss_fn": nn.CrossEntropyLoss(reduction="sum")}),
    "cross-entropy, class weights": (classes, {"loss_fn": nn.CrossEntropyLoss(weight=class_weights)}),
    "cross-entropy, weights and ignored": (ignored, {"loss_fn": nn.CrossEntropyLoss(weight=class_weights)}),
    "cross-entropy, another index": (classes, {"loss_fn": nn.CrossEntropyLoss(ignore_index=2)}),
    "cross-entropy, smoothed": (ignored, {"loss_fn": nn.CrossEntropyLoss(label_smoothing=0.2)}),
    "cross-entropy, smoothed and weights": (
        ignored,
        {"loss_fn": nn.CrossEntropyLoss(weight=class_weights, label_smoothing=0.2)},
    ),
    "cross-entropy, probabilities": (
        probabilities,
        {"loss_fn": nn.CrossEntropyLoss(weight=class_weights)},
    ),
    "nll": (ignored, {"loss_fn": nn.NLLLoss(weight=class_weights), "own": log_model}),
    "cross-entropy function": (ignored, {"loss_fn": F.cross_entropy}),
    "nll function": (ignored, {"loss_fn": F.nll_loss, "own": log_model}),
    "partial of the function": (classes, {"loss_fn": partial(F.cross_entropy, weight=class_weights, ignore_index=2)}),
    "partial of a module": (ignored, {"loss_fn": partial(nn.CrossEntropyLoss(weight=class_weights))}),
    "counted by the user": (
        ignored,
        {
            "compute_loss": lambda m, b: F.cross_entropy(m(b[0]), b[1]),
            "weight": lambda part: (part[1] != -100).sum(),
        },
    ),
    "sum by the user": (classes, {"loss_fn": lambda out, t: F.cross_entropy(out, t, reduction="sum"), "weight": "sum"}),
    "assumed": (classes, {"loss_fn": lambda out, t: F.cross_entropy(out, t)}),
    "function that torch does not know to be a loss": (torch.randn(7, 3), {"loss_fn": partial(F.l1_loss)}),
}


@pytest.mark.parametrize("sizes", [[7], [4, 3], [1, 2, 4], [1] * 7], ids=str)
@pytest.mark.parametrize(("target", "options"), EXACT.values(), ids=EXACT)
def test_the_weighted_sum_is_the_loss_of_the_batch(target: Any, options: dict[str, Any], sizes: list[int]) -> None:
    """Whatever the reduction, weights and ignored targets, also for parts in which every target is ignored."""
    assert difference((x, target), sizes, **options) < 1e-6


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_split_of_any_ignored_targets(data: st.DataObject) -> None:
    """Holds for every pattern of ignored targets and every split that has a target left."""
    n = data.draw(st.integers(1, 12))
    target = torch.tensor(data.draw(st.lists(st.sampled_from([-100, 0, 1, 2]), min_size=n, max_size=n)))
    target[data.draw(st.integers(0, n - 1))] = 1
    cuts = sorted(data.draw(st.sets(st.integers(1, n - 1))) if n > 1 else set())
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
    assert difference((torch.randn(n, 4), target), sizes, loss_fn=nn.CrossEntropyLoss(weight=class_weights)) < 1e-5


def test_pixels_are_counted_over_all_dims() -> None:
    """Segmentation maps and torchvision's void class count pixel by pixel."""

    class Features(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> Any:
            return {"out": super().forward(x)}

    masks = torch.randint(0, 3, (4, 8, 8))
    masks[0], masks[1, :5] = 255, 255
    own = FCN(Features(3, 4, 1), nn.Conv2d(4, 3, 1))
    batch = (torch.rand(4, 3, 8, 8), masks)
    assert difference(batch, [1, 2, 1], own=own) < 1e-6
    assert resolve_weighting(batch, model=own).coefficients([batch], [4]) == [1.0]
    assert "not 255" in resolve_weighting(batch, model=own).describe()


def test_targets_of_a_dict_are_counted() -> None:
    """With loss_fn the target is taken from the dict."""

    class Named(nn.Linear):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return super().forward(features)

    batch = {"features": x, "target": ignored}
    assert difference(batch, [1, 2, 4], own=Named(4, 3), loss_fn=nn.CrossEntropyLoss()) < 1e-6


def test_a_part_without_targets_is_skipped() -> None:
    """Its loss would be nan; its factor is 0.0 and the others make up for it."""
    weighting = resolve_weighting((x, ignored))
    assert weighting.coefficients([(x[:1], ignored[:1]), (x[1:3], ignored[1:3])], [1, 2]) == [1.0, 0.0]


def test_a_batch_without_targets_is_refused() -> None:
    """0 / 0 is no loss."""
    with pytest.raises(ConfigError, match=r"weight 0.*every target is ignored"):
        resolve_weighting((x, ignored)).coefficients([(x[1:3], ignored[1:3])], [2])


class Focal(nn.CrossEntropyLoss):
    """Reduces in a way of its own."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(input, target) ** 2


class Renamed(nn.CrossEntropyLoss):
    """A cross-entropy by another name."""


KINDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "samples asked for": ({"loss_weight": "samples", "loss_fn": nn.CrossEntropyLoss()}, "samples", "says so"),
    "sum asked for": ({"loss_weight": "sum"}, "sum", "says so"),
    "counted": ({"loss_weight": len}, "weight", "loss_weight counts it"),
    "compute_loss": ({"compute_loss": len}, "samples", "compute_loss is not known.*pass loss_weight"),
    "unknown function": ({"loss_fn": len}, "samples", "len is not known.*pass loss_weight"),
    "positional partial": ({"loss_fn": partial(F.cross_entropy, x)}, "samples", "partial is not known"),
    "own subclass": ({"loss_fn": Focal()}, "samples", "Focal is not known"),
    "own subclass, summed": ({"loss_fn": Focal(reduction="sum")}, "sum", "Focal has reduction='sum'"),
    "inherited forward": ({"loss_fn": Renamed()}, "weight", "Renamed is a mean over"),
    "no loss": ({}, "weight", "the default cross-entropy is a mean over the targets that are not -100"),
}


@pytest.mark.parametrize(("options", "kind", "said"), KINDS.values(), ids=KINDS)
def test_the_weighting_says_what_it_is_and_why(options: dict[str, Any], kind: str, said: str) -> None:
    """What is assumed is called assumed."""
    weighting = resolve_weighting((x, classes), **options)
    assert weighting.kind == kind
    assert re.search(said, weighting.describe())


OWN: dict[str, tuple[Any, str]] = {
    "token labels": ({"labels": torch.ones(2, 3, dtype=torch.long)}, "weight"),
    "class labels": ({"labels": torch.ones(2, dtype=torch.long)}, "samples"),
    "float labels": ({"labels": torch.rand(2, 3)}, "samples"),
    "list of labels": ({"labels": [{"boxes": x}]}, "samples"),
    "no labels": ({"x": x}, "samples"),
    "input alone": (x, "samples"),
    "detection": (([x], [{"boxes": x}]), "samples"),
}


@pytest.mark.parametrize(("batch", "kind"), OWN.values(), ids=OWN)
def test_losses_of_the_model_s_own_count_token_labels(batch: Any, kind: str) -> None:
    """Integer labels of two dims and more are counted; everything else is taken for a mean over samples."""
    assert resolve_weighting(batch).kind == kind


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "unreduced module": (
        lambda: resolve_weighting((x, classes), loss_fn=nn.CrossEntropyLoss(reduction="none")),
        "CrossEntropyLoss with reduction='none'",
    ),
    "unreduced function": (
        lambda: resolve_weighting((x, classes), loss_fn=partial(F.mse_loss, reduction="none")),
        "mse_loss with reduction='none'",
    ),
    "unknown word": (lambda: resolve_weighting((x, classes), loss_weight="tokens"), "Allowed: 'samples', 'sum'"),
    "number": (lambda: resolve_weighting((x, classes), loss_weight=2), "loss_weight is 2"),
    "negative": (lambda: coefficients([1, -1]), "gave -1.0"),
    "not finite": (lambda: coefficients([1.0, math.nan]), "gave nan"),
    "all zero": (lambda: coefficients([0, 0]), "Every part"),
    "text": (lambda: coefficients(["a"]), "returned a str"),
    "bool": (lambda: coefficients([True]), "returned a bool"),
    "vector": (lambda: coefficients([torch.ones(2)]), r"shape \(2,\)"),
}


def coefficients(values: list[Any]) -> list[float]:
    weighting = resolve_weighting((x, classes), loss_weight=lambda index: values[index])
    return weighting.coefficients(range(len(values)), [1] * len(values))


@pytest.mark.parametrize(("call", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_a_weighting_is_refused(call: Callable[[], Any], said: str) -> None:
    """The error says what was given and what is allowed."""
    with pytest.raises(ConfigError, match=said):
        call()


WEIGHTS: dict[str, list[Any]] = {
    "integers": [1, 3],
    "floats": [0.5, 1.5],
    "tensors": [torch.tensor(1), torch.tensor(3)],
    "one element": [torch.tensor([1.0]), torch.tensor([[3.0]])],
    "mixed": [torch.tensor(1), torch.tensor(3.0, requires_grad=True)],
    "number and tensor": [1, torch.tensor(3)],
}


@pytest.mark.parametrize("values", WEIGHTS.values(), ids=WEIGHTS)
def test_weights_may_be_numbers_or_tensors(values: list[Any]) -> None:
    """Whatever loss_weight returns, the factors are plain floats that add up to 1."""
    assert coefficients(values) == [0.25, 0.75]


def test_the_weights_themselves_are_there_to_be_summed_over_ranks() -> None:
    """Samples or counts, before they are normalised."""
    assert Weighting("samples", "").weights([0, 1], [3, 2]) == [3.0, 2.0]
    assert resolve_weighting((x, ignored)).weights([(x, ignored)], [7]) == [4.0]


def test_class_weights_may_lie_on_another_device_than_the_targets() -> None:
    """The targets go where the weights are; nothing else is needed there."""
    weighting = resolve_weighting((x, classes), loss_fn=nn.CrossEntropyLoss(weight=class_weights.to("meta")))
    assert weighting.weigh is not None
    assert weighting.weigh((x, classes)).device.type == "meta"
