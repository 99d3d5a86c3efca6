"""Which weighting a loss asks for: exact where the loss is known, by samples where it is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from autofit.errors import ConfigError
from autofit.loss.architectures import CROSS_ENTROPY_IGNORES, ctc_reduction, ignored_index, ignored_label, shifts_labels
from autofit.loss.default import is_class_target, seen
from autofit.loss.forms import is_single_input, target_of
from autofit.loss.weighting import CountTargets, Weighting

_CROSS_ENTROPIES = (nn.CrossEntropyLoss, nn.NLLLoss)
_CROSS_ENTROPY_FUNCTIONS = (F.cross_entropy, F.nll_loss)
_ASSUMED = "it is taken to be a mean over samples; pass loss_weight if it is not"


def resolve_weighting(
    batch: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    compute_loss: Callable[..., Any] | None = None,
    loss_weight: Any = None,
    model: nn.Module | None = None,
) -> Weighting:
    """The weighting for this loss on batches like `batch`.

    `loss_weight` decides: `"samples"`, `"sum"`, or `loss_weight(part) -> number` (say, the tokens that count). Without
    it: torch's cross-entropies and the default one count the targets that are not ignored (or their class weights), a
    `reduction="sum"` is a sum, and a dict batch with token labels counts those that are not -100, without the first
    position for causal language models. Everything else is taken for a mean over samples.

    Raises ConfigError for any other `loss_weight` and for losses of `reduction="none"`.
    """
    if loss_weight is not None:
        return _as_asked(loss_weight)
    if compute_loss is not None:
        return Weighting("samples", f"compute_loss is not known, so {_ASSUMED}")
    if loss_fn is not None:
        return _for_loss_fn(batch, loss_fn)
    if isinstance(batch, Mapping):
        return _for_own_loss(batch, model)
    if is_single_input(batch) or not isinstance(batch[-1], Tensor):
        return Weighting("samples", f"the model computes its own loss, so {_ASSUMED}")
    return _for_default_loss(batch[-1], model)


def _as_asked(loss_weight: Any) -> Weighting:
    if loss_weight == "samples":
        return Weighting("samples", "loss_weight says so")
    if loss_weight == "sum":
        return Weighting("sum", "loss_weight says so")
    if callable(loss_weight):
        return Weighting("weight", "loss_weight counts it", weigh=loss_weight)
    raise ConfigError(
        f"loss_weight is {loss_weight!r}. Allowed: 'samples', 'sum', or a callable that takes a batch and returns what "
        "its loss is a mean over, such as the number of tokens."
    )


def _for_default_loss(target: Tensor, model: nn.Module | None) -> Weighting:
    if not is_class_target(target):
        return Weighting("samples", "the default loss for float targets is a mean over samples")
    ignored = ignored_index(model)
    reason = f"the default cross-entropy is a mean over the targets that are not {ignored}"
    return Weighting("weight", reason, weigh=CountTargets(_last, ignored))


def _last(batch: Any) -> Any:
    return batch[-1]


def _for_own_loss(batch: Mapping[Any, Any], model: nn.Module | None) -> Weighting:
    reduction = ctc_reduction(model)
    if reduction == "sum":
        return Weighting("sum", "the model's config says ctc_loss_reduction='sum'")
    labels = batch.get("labels")
    if reduction is not None or not isinstance(labels, Tensor) or not is_class_target(labels) or labels.ndim < 2:
        return Weighting("samples", f"the model computes its own loss, so {_ASSUMED}")
    ignored, shifted = ignored_label(model), shifts_labels(model)
    first = ", the first position left out" if shifted else ""
    reason = f"the model's loss is a mean over the labels that are not {ignored}{first}, by transformers' convention"
    return Weighting("weight", reason, weigh=CountTargets(_labels, ignored, shifted=shifted))


def _labels(batch: Any) -> Any:
    return batch["labels"]


@dataclass(frozen=True)
class _Known:
    """What can be read from a loss of torch."""

    name: str
    reduction: str
    cross_entropy: bool
    class_weights: Tensor | None = None
    ignore_index: int = CROSS_ENTROPY_IGNORES


def _for_loss_fn(batch: Any, loss_fn: Callable[..., Any]) -> Weighting:
    known = _known(loss_fn)
    if known is None:
        return Weighting("samples", f"{_name(loss_fn)} is not known, so {_ASSUMED}")
    if known.reduction == "none":
        raise ConfigError(
            f"loss_fn is {known.name} with reduction='none', which gives one loss per element. Pass reduction='mean' "
            "or 'sum', or compute_loss(model, batch) that reduces it."
        )
    if known.reduction == "sum":
        return Weighting("sum", f"{known.name} has reduction='sum'")
    if not known.cross_entropy or not is_class_target(target_of(batch)):
        return Weighting("samples", f"{known.name} is a mean over samples")
    over = f"targets that are not {known.ignore_index}"
    if known.class_weights is not None:
        over = f"class weights of the {over}"
    counted = CountTargets(target_of, known.ignore_index, class_weights=known.class_weights)
    return Weighting("weight", f"{known.name} is a mean over the {over}", weigh=counted)


def _known(loss_fn: Callable[..., Any]) -> _Known | None:
    keywords: Mapping[str, Any] = {}
    if isinstance(loss_fn, partial):
        if loss_fn.args:
            return None
        keywords, loss_fn = loss_fn.keywords, loss_fn.func
    if isinstance(loss_fn, _Loss):
        return _known_module(loss_fn)
    if getattr(loss_fn, "__module__", None) != "torch.nn.functional":
        return None
    if loss_fn in _CROSS_ENTROPY_FUNCTIONS:
        return _Known(
            _name(loss_fn),
            keywords.get("reduction", "mean"),
            cross_entropy=True,
            class_weights=keywords.get("weight"),
            ignore_index=keywords.get("ignore_index", CROSS_ENTROPY_IGNORES),
        )
    return _Known(_name(loss_fn), keywords.get("reduction", "mean"), cross_entropy=False)


def _known_module(loss_fn: _Loss) -> _Known | None:
    name = type(loss_fn).__name__
    if isinstance(loss_fn, _CROSS_ENTROPIES) and type(loss_fn).forward in [kind.forward for kind in _CROSS_ENTROPIES]:
        weights = loss_fn.weight
        return _Known(name, loss_fn.reduction, True, class_weights=weights, ignore_index=loss_fn.ignore_index)
    if type(loss_fn).__module__ == "torch.nn.modules.loss" or loss_fn.reduction == "sum":
        return _Known(name, loss_fn.reduction, cross_entropy=False)
    return None


def _name(loss_fn: Any) -> str:
    return getattr(loss_fn, "__name__", None) or (type(loss_fn).__name__ if callable(loss_fn) else seen(loss_fn))
