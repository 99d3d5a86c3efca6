"""What is known about the losses of particular libraries' models, read from the model alone."""

from __future__ import annotations

import re

from torch import nn

CROSS_ENTROPY_IGNORES = -100  # torch.nn.CrossEntropyLoss and every language model of transformers
SEGMENTATION_IGNORES = 255  # torchvision's references/segmentation/train.py

# Decoders of transformers that predict the next token; their labels are shifted by one (loss/loss_utils.py,
# ForCausalLMLoss, which is also what a model without a known loss type gets).
_NEXT_TOKEN_LOSSES = ("ForCausalLM", "ForConditionalGeneration", "CsmForConditionalGeneration")
_NEXT_TOKEN_NAMES = re.compile(r"CausalLM|LMHead")
# Named alike, yet these compare each position with the label at the same place (modeling_xlnet.py, modeling_xlm.py,
# modeling_flaubert.py).
_NOT_SHIFTED = ("XLNetLMHead", "XLMWithLMHead", "FlaubertWithLMHead")


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own model inside of data-parallel, compiled and adapter wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        elif inner is None and callable(base_model := getattr(model, "get_base_model", None)):  # peft
            inner = base_model()
        if not isinstance(inner, nn.Module) or inner is model:
            return model
        model = inner


def ignored_index(model: nn.Module | None) -> int:
    """The class that the default cross-entropy leaves out: 255 for torchvision's segmentation models, else -100."""
    if model is not None:
        for kind in type(unwrapped(model)).__mro__:
            if kind.__module__.startswith("torchvision.models.segmentation"):
                return SEGMENTATION_IGNORES
    return CROSS_ENTROPY_IGNORES


def shifts_labels(model: nn.Module | None) -> bool:
    """Whether the model compares each position with the label one to the right, as causal language models do."""
    if model is None:
        return False
    own = unwrapped(model)
    config = getattr(own, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        return False
    name = type(own).__name__
    if name.startswith(_NOT_SHIFTED):
        return False
    loss_type = getattr(own, "loss_type", None)
    return loss_type in _NEXT_TOKEN_LOSSES or (loss_type is None and bool(_NEXT_TOKEN_NAMES.search(name)))


def ignored_label(model: nn.Module | None) -> int:
    """The label that a model of transformers leaves out: -100, or its config's for semantic segmentation."""
    if model is not None:
        own = unwrapped(model)
        if "SemanticSegmentation" in type(own).__name__:
            return int(getattr(getattr(own, "config", None), "semantic_loss_ignore_index", SEGMENTATION_IGNORES))
    return CROSS_ENTROPY_IGNORES


def ctc_reduction(model: nn.Module | None) -> str | None:
    """`"sum"` or `"mean"` for transformers' speech models trained with CTC; None for all others."""
    own = None if model is None else unwrapped(model)
    if own is None or not type(own).__name__.endswith("ForCTC"):
        return None
    reduction = getattr(getattr(own, "config", None), "ctc_loss_reduction", None)
    return reduction if isinstance(reduction, str) else None
