"""What a plan is told about the batch and the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from autofit.batch import BatchLayout
from autofit.loss.default import is_class_target
from autofit.loss.forms import is_single_input
from autofit.loss.infer import resolve_weighting
from autofit.loss_facts import LossFacts


def loss_facts(
    batch: Any,
    layout: BatchLayout,
    model: nn.Module,
    *,
    loss_fn: Callable[..., Any] | None = None,
    compute_loss: Callable[..., Any] | None = None,
    loss_weight: Any = None,
    batch_dims: Any = None,
) -> LossFacts:
    """The facts for these arguments of `tune` and its sample batch."""
    weighting = resolve_weighting(
        batch, loss_fn=loss_fn, compute_loss=compute_loss, loss_weight=loss_weight, model=model
    )
    callables = {"loss_fn": loss_fn, "compute_loss": compute_loss, "loss_weight": loss_weight}
    known = loss_fn is None and compute_loss is None
    return LossFacts(
        batch_dims=batch_dims,
        splits=dict(layout.dims),
        given=tuple(name for name, value in callables.items() if callable(value)),  # type: ignore[misc]
        loss_weight=None if callable(loss_weight) else loss_weight,
        default_loss=_default_loss(batch) if known else None,
        **weighting.facts(),
    )


def _default_loss(batch: Any) -> Any:
    if hasattr(batch, "items") or is_single_input(batch) or not isinstance(batch[-1], Tensor):
        return None
    return "cross_entropy" if is_class_target(batch[-1]) else "mse_loss"
