"""How the model is called on a batch, and what of its output is the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from autofit.errors import ConfigError
from autofit.loss.default import default_loss, own_loss, seen

TARGET_KEYS = ("labels", "label", "targets", "target", "y")


@dataclass(frozen=True)
class Loss:
    """`loss(model, batch)`: the batch's loss as a tensor without dims that backward can start from.

    | batch                     | with `loss_fn`                    | without                             |
    |---------------------------|-----------------------------------|-------------------------------------|
    | `(inputs…, tensor)`       | `loss_fn(model(*inputs), target)` | by output and target (default_loss) |
    | `(inputs…, nest)`         | `loss_fn(model(*inputs), target)` | `model(*batch)` gives the loss      |
    | Mapping                   | `loss_fn(model(**rest), target)`  | `model(**batch)` gives the loss     |
    | `(input,)`, anything else | refused: there is no target       | `model(batch)` gives the loss       |

    The target of a Mapping is its `labels`, `label`, `targets`, `target` or `y`, the rest is passed by name. A list of
    Mappings is one input.

    A model gives the loss as a tensor of one element, as `.loss` or `["loss"]`, or as a dict of losses, which are
    summed. `compute_loss(model, batch)` replaces all of this. Whether the loss is finite is not looked at: that would
    wait for the device. Raises ConfigError when there is no loss, or none that backward can use.
    """

    loss_fn: Callable[..., Any] | None = None
    compute_loss: Callable[..., Any] | None = None

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss; raises ConfigError unless it is one floating point number with a gradient (if grad is enabled)."""
        if self.compute_loss is not None:
            return _checked(self.compute_loss(model, batch), "compute_loss")
        if self.loss_fn is not None:
            output, target = _output_and_target(model, batch)
            return _checked(self.loss_fn(output, target), "loss_fn")
        return _checked(_without_loss_fn(model, batch), "the model")


def resolve_loss(*, loss_fn: Callable[..., Any] | None = None, compute_loss: Callable[..., Any] | None = None) -> Loss:
    """The loss for these arguments of the user; raises ConfigError when they cannot be meant."""
    if loss_fn is not None and compute_loss is not None:
        raise ConfigError(
            "Both loss_fn and compute_loss were passed. loss_fn(output, target) is given what the model returned; "
            "compute_loss(model, batch) calls the model itself. Pass one of them."
        )
    for name, value in (("loss_fn", loss_fn), ("compute_loss", compute_loss)):
        if value is not None and not callable(value):
            raise ConfigError(f"{name} must be callable, got {seen(value)}.")
        if isinstance(value, type):
            raise ConfigError(f"{name} is the class {value.__name__}; pass an instance, {value.__name__}().")
    return Loss(loss_fn=loss_fn, compute_loss=compute_loss)


def is_single_input(batch: Any) -> bool:
    """Whether the batch is one argument for the model, not inputs followed by a target."""
    if isinstance(batch, PackedSequence) or not isinstance(batch, (tuple, list)):
        return not isinstance(batch, Mapping)
    return len(batch) < 2 or all(isinstance(item, Mapping) for item in batch)


def target_of(batch: Any) -> Any:
    """The target that a loss_fn is given; raises ConfigError when the batch has none or several."""
    if isinstance(batch, Mapping):
        return batch[target_key(batch)]
    if is_single_input(batch):
        raise ConfigError(
            f"loss_fn needs a target, and this batch has none: {seen(batch)}. Allowed: a tuple or list "
            f"(inputs…, target), or a dict with one of {', '.join(TARGET_KEYS)}. For anything else pass "
            "compute_loss(model, batch)."
        )
    return batch[-1]


def target_key(batch: Mapping[Any, Any]) -> str:
    """The key of a Mapping batch that holds the target; raises ConfigError unless there is exactly one."""
    found = [key for key in TARGET_KEYS if key in batch]
    if len(found) != 1:
        raise ConfigError(
            f"loss_fn needs exactly one target in a dict batch, under one of {', '.join(TARGET_KEYS)}; this one has "
            f"{', '.join(found) or 'none of them'} (keys: {', '.join(map(str, batch))}). "
            "Pass compute_loss(model, batch) instead."
        )
    return found[0]


def _output_and_target(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    if type(batch) is tuple and len(batch) == 2 and type(batch[0]) is Tensor:  # the most common batch, at once
        return model(batch[0]), batch[1]
    target = target_of(batch)
    if isinstance(batch, Mapping):
        key = target_key(batch)
        return model(**{name: batch[name] for name in batch if name != key}), target
    return model(*batch[:-1]), target


def _without_loss_fn(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return own_loss(model(**batch), call="model(**batch)")
    if is_single_input(batch):
        only = batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 1 else batch
        return own_loss(model(only), call="model(batch)")
    *inputs, target = batch
    if not isinstance(target, Tensor):
        return own_loss(model(*batch), call="model(*batch)")
    return default_loss(model(*inputs), target, model=model)


def _checked(value: Any, source: str) -> Tensor:
    wanted = "Allowed: a floating point tensor with one element that requires grad."
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"{source} returned {seen(value)} as the loss. {wanted} A number has lost its graph: do not call .item()."
        )
    if value.numel() != 1:
        raise ConfigError(
            f"{source} returned a loss of shape {tuple(value.shape)}. {wanted} Reduce it: .mean(), or "
            "reduction='mean' in the loss."
        )
    if not value.is_floating_point():
        raise ConfigError(f"{source} returned a loss of dtype {value.dtype}. {wanted}")
    if torch.is_grad_enabled() and not value.requires_grad:
        raise ConfigError(
            f"{source} returned a loss that does not require grad, so it does not reach any parameter. {wanted} "
            "Look for detach(), .item(), torch.no_grad(), or a model whose parameters are all frozen."
        )
    return value if value.ndim == 0 else value.reshape(())
