"""Scaled dot-product attention as a CUDA device would run it: which kernel it takes, and what that kernel allocates.

Without a driver torch falls back to the kernel that writes attention out. Source of the rules: `sdp_utils.cpp` and
`attention.cpp` in `aten/src/ATen/native/transformers`, torch 2.6 to 2.14. Where cuDNN's kernel would be preferred,
flash stands for it: both keep the output and one number per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F

from autofit.gpus import Capability

Kernel = Literal["flash", "efficient", "math"]

_HALVES = (torch.float16, torch.bfloat16)
_FLASH_MAX_HEAD = 256
_BIAS_ALIGNMENT = 16


def choose_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    enable_gqa: bool,
    capability: Capability,
) -> Kernel:
    """The kernel that torch's default order takes on a device of this compute capability."""
    allowed: Any = torch.backends.cuda
    if any(tensor.dim() != 4 or tensor.stride(-1) != 1 or 0 in tensor.shape for tensor in (query, key, value)):
        return "math"
    head = query.shape[-1]
    same_heads = query.shape[1] == key.shape[1] == value.shape[1]
    if (
        allowed.flash_sdp_enabled()
        and capability >= (8, 0)
        and query.dtype in _HALVES
        and mask is None
        and head == key.shape[-1] == value.shape[-1] <= _FLASH_MAX_HEAD
        and (same_heads or enable_gqa)
    ):
        return "flash"
    dtypes = (torch.float32, torch.float16) if capability < (8, 0) else (torch.float32, *_HALVES)
    if (
        allowed.mem_efficient_sdp_enabled()
        and capability >= (5, 0)
        and query.dtype in dtypes
        and query.dtype == key.dtype == value.dtype
        and same_heads
        and head % _alignment(query.dtype, capability) == 0
        and value.shape[-1] % _alignment(query.dtype, capability) == 0
        and not (is_causal and mask is not None)
    ):
        return "efficient"
    return "math"


def _alignment(dtype: torch.dtype, capability: Capability) -> int:
    """Head dims must be multiples of what one matrix instruction reads."""
    if dtype in _HALVES:
        return 8 if capability >= (8, 0) else 4 if capability >= (7, 0) else 1
    return 4 if capability >= (8, 0) else 1


def cuda_attention(capability: Capability) -> Callable[..., torch.Tensor]:
    """A replacement for `torch.nn.functional.scaled_dot_product_attention` with that device's kernels."""

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        query, key, value = _autocast(query), _autocast(key), _autocast(value)
        mask = None if attn_mask is None else _autocast(attn_mask)
        kernel = choose_kernel(
            query, key, value, mask, is_causal=is_causal, enable_gqa=enable_gqa, capability=capability
        )
        aten = torch.ops.aten
        if kernel == "flash":
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if kernel == "efficient":
            mask = None if mask is None else _as_bias(mask, query, key)
            keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
            out = aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, keep, dropout_p, is_causal, scale=scale
            )
        else:
            out = aten._scaled_dot_product_attention_math(
                query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )
        return out[0]  # type: ignore[no-any-return]

    return scaled_dot_product_attention


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Attention is one of the operators that autocast runs in its lower precision."""
    if torch.is_autocast_enabled("cuda") and tensor.is_floating_point() and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype("cuda"))
    return tensor


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    head = query.shape[-1]
    if padding := -head % 8:
        query, key, value = (F.pad(tensor, (0, padding)) for tensor in (query, key, value))
    scale = 1 / math.sqrt(head) if scale is None else scale
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return out[..., :head] if padding else out


def _as_bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The mask as the efficient kernel takes it: a float bias of one value per score, rows aligned to 16 elements."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -torch.inf).to(query.dtype)
    rows, columns = query.shape[2], key.shape[2]
    if padding := -columns % _BIAS_ALIGNMENT:
        mask = F.pad(mask, (0, padding))[..., :columns]
    return mask.expand(query.shape[0], query.shape[1], rows, columns)
