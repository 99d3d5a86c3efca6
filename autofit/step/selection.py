"""Selective recomputation: which operators are too dear to run twice, and blocks where they cannot be kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

aten = torch.ops.aten

# Matrix products, convolutions and attention: nearly all of the arithmetic of a forward pass, for a part of the
# activations. Packets, so that every overload counts.
KEPT_OPERATORS = frozenset(
    {
        aten.mm,
        aten.addmm,
        aten.bmm,
        aten.baddbmm,
        aten.addbmm,
        aten._scaled_mm,
        aten._grouped_mm,
        aten.convolution,
        aten._convolution,
        aten.cudnn_convolution,
        aten.miopen_convolution,
        aten.mkldnn_convolution,
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
        aten._flash_attention_forward,
        aten._efficient_attention_forward,
    }
)


def is_kept(operator: Any) -> bool:
    """Whether selective recomputation keeps what the operator gives, rather than to run it again."""
    return getattr(operator, "overloadpacket", None) in KEPT_OPERATORS


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(operator) else CheckpointPolicy.PREFER_RECOMPUTE


# What `torch.utils.checkpoint.checkpoint` takes as `context_fn`.
selective_contexts: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] = partial(
    create_selective_checkpoint_contexts, _policy
)
