"""Where the stand-in for an operator on fake tensors says something else than the operator does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

_LAYER_NORM_BACKWARD = torch.ops.aten.native_layer_norm_backward.default
_RNN_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
# What they keep for backward is rounded up inside, so that it does not grow evenly with the samples.
UNEVEN = frozenset({_RNN_LAYER})

_Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def as_it_is(operator: Any, args: Sequence[Any], out: Any) -> Any:
    """`out`, the fake result of `operator`, as the operator itself would lay it out."""
    if operator is _LAYER_NORM_BACKWARD and out[0] is not None and not out[0].is_contiguous():
        # The kernels write it contiguous; the stand-in for them follows the incoming gradient's strides.
        return (torch.empty(out[0].shape, dtype=out[0].dtype, device=out[0].device), *out[1:])
    if operator is _RNN_LAYER:
        # What oneDNN keeps for backward is most of an LSTM's memory, and the stand-in leaves it empty.
        size = _workspace_bytes(tuple(map(_described, args)))
        return (*out[:-1], torch.empty(size, dtype=torch.uint8, device=out[0].device))
    return out


def _described(argument: Any) -> Any:
    """What of an argument decides about memory, to be hashed."""
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape), tuple(argument.stride()), argument.dtype
    return tuple(argument) if isinstance(argument, (list, tuple)) else argument


@cache
def _workspace_bytes(described: tuple[Any, ...]) -> int:
    """oneDNN is asked by running the layer on zeros, once for each shape: no rule for the size is public."""
    with unset_fake_temporarily(), torch.enable_grad():  # without, nothing is kept
        args = [_zeros(value) if _is_tensor(value) else _plain(value) for value in described]
        workspace: torch.Tensor = _RNN_LAYER(*args)[-1]
        return workspace.numel()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and isinstance(value[2], torch.dtype)


def _zeros(spec: _Spec) -> torch.Tensor:
    shape, stride, dtype = spec
    return torch.empty_strided(shape, stride, dtype=dtype).zero_()


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
