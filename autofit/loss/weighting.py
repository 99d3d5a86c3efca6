"""One factor per micro-batch, such that the factors times the losses add up to the loss of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from autofit.errors import ConfigError


@dataclass(frozen=True)
class Weighting:
    """How the losses of micro-batches make up the loss of the batch. `reason` says why it is done this way.

    `samples`: the loss is a mean over samples. `sum`: it is a sum. `weight`: it is a mean over what `weigh(part)`
    counts, such as the targets that are not ignored.
    """

    kind: Literal["samples", "sum", "weight"]
    reason: str
    weigh: Callable[[Any], Any] | None = None

    def coefficients(self, parts: Sequence[Any], sizes: Sequence[int], *, batch: Any = None) -> list[float]:
        """One factor per part of `sizes` samples; 0.0 means that the part has no say and its loss may be nan: skip it.

        The `batch` that the parts were cut from, where it is at hand, saves counting part by part. Weights that are
        tensors are read together, so parts on a device cost one wait for it, and parts that are still on the host none.
        Raises ConfigError when all weights are zero, or one is negative or not finite.
        """
        if self.kind == "sum":
            return [1.0] * len(parts)
        weights = self.weights(parts, sizes, batch=batch)
        total = math.fsum(weights)
        if total == 0:
            raise ConfigError(
                f"Every part of this batch has weight 0, so its loss is undefined ({self.reason}). Leave batches out "
                "in which every target is ignored."
            )
        return [weight / total for weight in weights]

    def weights(self, parts: Sequence[Any], sizes: Sequence[int], *, batch: Any = None) -> list[float]:
        """What each part weighs: samples, or what `weigh` counts; raises ConfigError as `coefficients` does."""
        if self.weigh is None:
            return [float(size) for size in sizes]
        if batch is not None and isinstance(self.weigh, CountTargets) and self.weigh.all_count(batch):
            return [float(self.weigh.targets(part)) for part in parts]
        weights = _as_floats([self.weigh(part) for part in parts])
        for weight in weights:
            if not math.isfinite(weight) or weight < 0:
                raise ConfigError(f"loss_weight gave {weight!r}. Allowed: finite numbers that are not negative.")
        return weights

    def facts(self) -> dict[str, Any]:
        """The weighting as fields of `LossFacts`."""
        if self.kind != "weight":
            return {"weighting": self.kind}
        counted = self.weigh
        if not isinstance(counted, CountTargets):
            return {"weighting": "own"}
        return {
            "weighting": "targets",
            "ignore_index": counted.ignore_index,
            "shifted": counted.shifted,
            "class_weights": counted.class_weights is not None,
        }

    def describe(self) -> str:
        """One sentence for people: the weighting and why."""
        how = {
            "samples": "Micro-batches are weighted by their samples",
            "sum": "The losses of micro-batches are added up",
            "weight": "Micro-batches are weighted by what their loss is a mean over",
        }[self.kind]
        return f"{how}: {self.reason}."


def _as_floats(values: Sequence[Any]) -> list[float]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (Real, Tensor)):
            raise ConfigError(
                f"loss_weight returned a {type(value).__name__}. Allowed: a number or a tensor of one element."
            )
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ConfigError(
                f"loss_weight returned a tensor of shape {tuple(value.shape)}. Allowed: a number or a tensor of one "
                "element."
            )
    on_device = [value for value in values if isinstance(value, Tensor) and not value.is_cpu]
    if len(on_device) == len(values) and len({(v.device, v.dtype) for v in on_device}) == 1:
        return [float(weight) for weight in torch.stack([value.detach().reshape(()) for value in values]).tolist()]
    return [float(value.detach() if isinstance(value, Tensor) else value) for value in values]


@dataclass(frozen=True)
class CountTargets:
    """What a mean cross-entropy divides by: the targets that are not ignored, or the sum of their class weights.

    `target(part)` finds the targets; `shifted` leaves out the first position, which a causal language model does not
    predict.
    """

    target: Callable[[Any], Any]
    ignore_index: int
    class_weights: Tensor | None = None
    shifted: bool = False

    def all_count(self, batch: Any) -> bool:
        """Whether no target of the batch is ignored and all weigh the same."""
        return self.class_weights is None and not bool((self.target(batch) == self.ignore_index).any())

    def targets(self, part: Any) -> int:
        """How many targets there are, ignored ones too."""
        target: Tensor = self.target(part)
        length = target.shape[-1] if self.shifted else 0
        return target.numel() // length * (length - 1) if length else target.numel()

    def __call__(self, part: Any) -> Tensor:
        """The divisor as a tensor without dims, on the device where it was counted."""
        target: Tensor = self.target(part)
        if self.shifted:
            target = target[..., 1:]
        counted = target != self.ignore_index
        if self.class_weights is None:
            return torch.sum(counted)
        weights = self.class_weights.detach()
        indices = target.to(weights.device, dtype=torch.long)
        counted = counted.to(weights.device)
        return torch.sum(weights[indices.where(counted, 0)] * counted)
