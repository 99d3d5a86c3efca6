"""Memory of operators that a trace cannot see, because it lies neither in their arguments nor in their results."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from autofit.gpus import Capability
from autofit.predict.recorder import Phase
from autofit.units import KiB, MiB

# Driver, libraries and kernels that are loaded when they are first used; outside the allocator. Published figures for
# torch 2.0 and later lie between 300 and 500 MiB and grow with the number of kernels.
CUDA_CONTEXT_BYTES = 426 * MiB

_aten = torch.ops.aten
_MATRIX_PRODUCTS = frozenset(
    {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.mv.default}
    | {_aten.addmv.default, _aten.dot.default, _aten._addmm_activation.default}
)
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_backward.default
_EFFICIENT_BACKWARD = _aten._scaled_dot_product_efficient_attention_backward.default
_FLASH_TILE = 128

# An operator's name and its arguments, tensors by shape and dtype.
OperatorKey = tuple[str, Hashable]
# Bytes that were seen to be taken inside operators.
Learned = Mapping[OperatorKey, int]


def cublas_workspace_bytes(capability: Capability) -> int:
    """What one cuBLAS handle keeps: 32 MiB on Hopper, Blackwell and later, else the `:4096:2:16:8` KiB of the default.

    Source: `getChosenWorkspaceSize` in `aten/src/ATen/cuda/CublasHandlePool.cpp`.
    """
    return 32 * MiB if capability[0] >= 9 else (4096 * 2 + 16 * 8) * KiB


class CudaScratch:
    """cuBLAS workspaces, and what attention keeps while its backward runs.

    Each thread that multiplies matrices has a cuBLAS handle: the one that runs forward, and the engine's, which runs
    backward and recomputation. cuBLASLt shares their workspaces. What cuDNN takes inside a convolution is not known:
    its heuristics choose it on the device.
    """

    def __init__(self, capability: Capability) -> None:
        self._workspace_bytes = cublas_workspace_bytes(capability)
        self._threads: set[bool] = set()

    def lasting(self, operator: Any, phase: Phase) -> Sequence[int]:
        """The workspace of a thread's handle, at the first product of matrices in it."""
        if operator not in _MATRIX_PRODUCTS or (phase == "backward") in self._threads:
            return ()
        self._threads.add(phase == "backward")
        return (self._workspace_bytes,)

    def passing(self, operator: Any, args: Sequence[Any], out: Any) -> Sequence[int]:
        """Float32 accumulators of attention's backward.

        Source: `mha_bwd` in `flash_api.cpp` (gradient of the query, and one number per row, both over whole tiles) and
        `_efficient_attention_backward` (one number per row).
        """
        if operator is _FLASH_BACKWARD:
            batch, heads, rows, width = args[1].shape
            tiles = -(-rows // _FLASH_TILE) * _FLASH_TILE
            return 4 * batch * heads * tiles * (-(-width // 32) * 32), 4 * batch * heads * tiles
        if operator is _EFFICIENT_BACKWARD:
            return (4 * prod(args[1].shape[:3]),)
        return ()


class LearnedScratch:
    """What operators took when they ran for real, by `learn_scratch`, beside what `known` says of lasting memory."""

    def __init__(self, learned: Learned, known: CudaScratch | None) -> None:
        self._learned = learned
        self._known = known
        self._operators = {name for (name, _), nbytes in learned.items() if nbytes}

    def lasting(self, operator: Any, phase: Phase) -> Sequence[int]:
        """As the known model says: what stays is no part of what one operator gives back."""
        return self._known.lasting(operator, phase) if self._known else ()

    def passing(self, operator: Any, args: Sequence[Any], out: Any) -> Sequence[int]:
        """Bytes that were seen for this operator on arguments of these shapes; 0 where it was never seen.

        An operator that takes something with any arguments takes 0 with others: the same events come out of all sizes.
        """
        if operator.name() not in self._operators:
            return ()
        return (self._learned.get(operator_key(operator, args), 0),)


def operator_key(operator: Any, args: Any) -> OperatorKey:
    """What the memory inside an operator is learned by."""
    return operator.name(), _key_of(args)


def _key_of(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_key_of, value))
    return value if isinstance(value, (bool, int, float, str, torch.dtype, type(None))) else type(value).__name__
