"""The loss when nobody passed one: what the model gives itself, or what its output and the target allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autofit.errors import ConfigError
from autofit.loss.architectures import ignored_index

_PASS = "Pass loss_fn(output, target), or compute_loss(model, batch)."

# Weights of auxiliary outputs. Segmentation: torchvision's references/segmentation/train.py. GoogLeNet: section 5 of
# "Going deeper with convolutions" (2014). Inception v3: PyTorch's tutorial on fine-tuning torchvision models.
_SEGMENTATION_AUX = 0.5
_GOOGLENET_AUX = 0.3
_INCEPTION_AUX = 0.4


def seen(value: Any) -> str:
    """What a value is, in the words of an error message."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with keys {', '.join(map(str, value)) or '(none)'}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(item).__name__ for item in value[:6])})"
    return f"a {type(value).__name__}"


def own_loss(output: Any, *, call: str) -> Tensor:
    """The loss that the model itself gives: one element, `.loss`, `["loss"]`, or the sum of a dict of losses.

    Raises ConfigError when the output is none of these.
    """
    loss: Tensor | None = _carried_loss(output)
    if loss is None and isinstance(output, Tensor) and output.numel() == 1:
        loss = output
    if loss is None:
        missing = " Its .loss is None: the batch has no labels." if getattr(output, "loss", output) is None else ""
        raise ConfigError(
            f"{call} returned {seen(output)}, which is not a loss.{missing} Without a loss_fn it must be a tensor of "
            f"one element, have .loss or ['loss'], or be a dict of losses. {_PASS}"
        )
    return loss


def _carried_loss(output: Any) -> Any:
    if isinstance(output, Mapping):
        return output["loss"] if output.get("loss") is not None else _sum_of_losses(output)
    return getattr(output, "loss", None)


def _sum_of_losses(output: Mapping[Any, Any]) -> Tensor | None:
    """The sum of a dict of losses, as torchvision's detection models return in training; None for any other dict."""
    losses = list(output.values())
    if not losses or not all(isinstance(x, Tensor) and x.numel() == 1 and x.is_floating_point() for x in losses):
        return None
    constant = [str(key) for key, value in output.items() if not value.requires_grad]
    if 0 < len(constant) < len(losses):
        raise ConfigError(
            f"The model returned a dict of numbers of which {', '.join(constant)} require no grad. Are they metrics? "
            "A dict of losses is summed, so leave out what is not one, or pass compute_loss(model, batch)."
        )
    return torch.stack([loss.reshape(()) for loss in losses]).sum()


def default_loss(output: Any, target: Tensor, *, model: nn.Module) -> Tensor:
    """Cross-entropy for integer targets, mean squared error for float targets of the output's shape.

    Also what the output itself carries as its loss, torchvision's segmentation dict (`out`, and `aux` at weight 0.5),
    and the auxiliary logits of GoogLeNet (0.3 each) and Inception v3 (0.4). Raises ConfigError for anything else.
    """
    carried: Tensor | None = _carried_loss(output)
    if carried is not None:
        return carried
    weighted = _weighted_outputs(output)
    if not weighted:
        raise ConfigError(f"There is no default loss for {seen(output)} and a target that is {seen(target)}. {_PASS}")
    criterion = _criterion(weighted[0][1], target, ignored_index(model))
    loss = criterion(weighted[0][1], target)
    for weight, part in weighted[1:]:
        loss = loss + weight * criterion(part, target)
    return loss


def _weighted_outputs(output: Any) -> list[tuple[float, Tensor]]:
    """The main output, of weight 1, and auxiliary ones; empty for an output that is none of the known kinds."""
    if isinstance(output, Tensor):
        return [(1.0, output)]
    if isinstance(output, Mapping) and isinstance(output.get("out"), Tensor):
        parts = [(1.0, output["out"]), (_SEGMENTATION_AUX, output.get("aux"))]
    elif isinstance(output, tuple) and isinstance(logits := getattr(output, "logits", None), Tensor):
        named = zip(getattr(output, "_fields", ()), output, strict=False)
        auxiliary = [value for name, value in named if name.startswith("aux_logits")]
        weight = _INCEPTION_AUX if len(auxiliary) == 1 else _GOOGLENET_AUX
        parts = [(1.0, logits), *((weight, value) for value in auxiliary)]
    else:
        return []
    return [(weight, part) for weight, part in parts if part is not None]


def is_class_target(target: Any) -> bool:
    """Whether the default loss takes a target for class indices: a tensor of integers (bool is not one)."""
    return (
        isinstance(target, Tensor)
        and target.dtype is not torch.bool
        and not (target.is_floating_point() or target.is_complex())
    )


def _criterion(output: Tensor, target: Tensor, ignore_index: int) -> Callable[[Tensor, Tensor], Tensor]:
    if is_class_target(target):
        classes_last = _classes_last(output, target)

        def cross_entropy(logits: Tensor, indices: Tensor) -> Tensor:
            if classes_last:
                logits, indices = logits.reshape(-1, logits.shape[-1]), indices.reshape(-1)
            return F.cross_entropy(logits, indices.long(), ignore_index=ignore_index)

        return cross_entropy
    if target.is_floating_point() and output.shape == target.shape and output.is_floating_point():
        return F.mse_loss
    raise ConfigError(
        f"There is no default loss for an output that is {seen(output)} and a target that is {seen(target)}. Defaults: "
        "cross-entropy for integer targets (class indices), mean squared error for float targets of exactly the "
        f"output's shape. {_PASS}"
    )


def _classes_last(output: Tensor, target: Tensor) -> bool:
    """Whether classes are the last dim (tokens: (N, T, C) with (N, T)), not dim 1 (images: (N, C, H, W), (N, H, W)).

    Raises ConfigError when the shapes allow neither, or both.
    """
    first = output.ndim >= 2 and (output.shape[0], *output.shape[2:]) == tuple(target.shape)
    last = output.ndim >= 3 and output.shape[:-1] == target.shape
    shapes = f"an output of shape {tuple(output.shape)} and an integer target of shape {tuple(target.shape)}"
    if first and last:
        raise ConfigError(f"With {shapes}, the classes may be dim 1 or the last one; nothing is guessed. {_PASS}")
    if not first and not last:
        raise ConfigError(
            f"There is no default loss for {shapes}. Cross-entropy takes (N, C) with (N,), (N, C, H, W) with "
            f"(N, H, W), or (N, T, C) with (N, T). {_PASS}"
        )
    if output.shape[-1 if last else 1] == 1:
        raise ConfigError(
            f"With {shapes} there is one class only, and cross-entropy would always be 0. For a binary target pass "
            "loss_fn=torch.nn.BCEWithLogitsLoss() and a float target of the output's shape."
        )
    return last
