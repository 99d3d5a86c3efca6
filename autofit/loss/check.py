"""Whether a loss really is the weighted sum of its parts, tried out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autofit.batch import BatchLayout, to_device
from autofit.errors import ConfigError
from autofit.loss.forms import Loss
from autofit.loss.weighting import Weighting


def check_weighting(
    loss: Loss, model: nn.Module, layout: BatchLayout, batch: Any, weighting: Weighting, *, samples: int = 8
) -> float | None:
    """The relative difference between the loss of a batch and the weighted sum over two uneven parts of it.

    About 1e-6 in float32 when the weighting is right; percents when it is wrong, or when no weighting can be right
    because samples are compared with each other (contrastive losses). Taken over at most `samples` samples, in eval
    mode and without gradients; all modes are restored.

    None where that says nothing: a single sample, a loss that is not finite, or a model that gives no loss in eval mode
    (torchvision's detection). The batch may lie on another device than the model.
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
            expected = _loss_of(loss, model, whole)
            pairs = zip(factors, parts, strict=True)
            actual = math.fsum(factor * _loss_of(loss, model, part) for factor, part in pairs if factor)
        except ConfigError:
            return None
    if not (math.isfinite(expected) and math.isfinite(actual)):
        return None
    scale = max(abs(expected), abs(actual))
    return abs(expected - actual) / scale if scale else 0.0


def _loss_of(loss: Loss, model: nn.Module, batch: Any) -> float:
    parameter = next(model.parameters(), None)
    return float(loss(model, batch if parameter is None else to_device(batch, parameter.device)))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
