"""Whether a loss really is the weighted sum of its parts, tried out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autofit.batch import BatchLayout, to_device
from autofit.errors import ConfigError
from autofit.loss.forms import Loss
from autofit.loss.weighting import Weighting

# Gradients of this many of the smallest parameters tell as much as all of them, and take next to no memory.
_PARAMETERS = 32


def check_weighting(
    loss: Loss, model: nn.Module, layout: BatchLayout, batch: Any, weighting: Weighting, *, samples: int = 8
) -> float | None:
    """How far the weighted sum over two uneven parts of a batch lies from the whole, as a share of it.

    The larger of two differences: of the loss, and of its gradient. The gradient is what accumulation is about, and it
    tells where the loss cannot: a model with fresh weights loses about the same on every sample. About 1e-6 in float32
    when the weighting is right; percents when it is wrong, or when none can be right because samples are compared with
    each other (contrastive losses).

    Taken over at most `samples` samples in eval mode. Modes are restored, and no `.grad` is touched. The batch may lie
    on another device than the model. None where nothing can be said: a single sample, a loss that is not finite, or a
    model that gives no loss in eval mode (torchvision's detection).
    """
    available = layout.samples_in(batch)
    count = min(available, samples)
    if count < 2:
        return None
    whole = layout.split(batch, [count, available - count])[0] if count < available else batch
    sizes = [count - count // 3, count // 3] if count > 2 else [1, 1]
    parts = layout.split(whole, sizes)
    with _evaluating(model):
        try:
            factors = weighting.coefficients(parts, sizes)
            expected = _measure(loss, model, whole)
            counted = [(factor, part) for factor, part in zip(factors, parts, strict=True) if factor]
            terms = [[factor * value for value in _measure(loss, model, part)] for factor, part in counted]
        except ConfigError:
            return None
    differences = [_relative(value, summands) for value, *summands in zip(expected, *terms, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else None


def _measure(loss: Loss, model: nn.Module, batch: Any) -> list[Tensor]:
    """The loss, and its gradient as one vector where it can be had."""
    parameters = sorted((p for p in model.parameters() if p.requires_grad), key=lambda p: p.numel())[:_PARAMETERS]
    placed = to_device(batch, parameters[0].device) if parameters else batch
    # cuDNN's recurrent layers refuse to go backward in eval mode
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        with torch.no_grad():
            return [_on_host(loss(model, placed))]
    value = loss(model, placed)
    gradients = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
    return [_on_host(value), torch.cat([_on_host(gradient) for gradient in gradients])]


def _on_host(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.flatten().to("cpu", torch.float64)


def _relative(expected: Tensor, summands: Sequence[Tensor]) -> float:
    """How far apart they are, as a share of the longest there is: summands may cancel."""
    distance = float((expected - sum(summands)).norm())
    scale = max(float(expected.norm()), sum(float(summand.norm()) for summand in summands))
    return distance / scale if scale else 0.0


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.enable_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
