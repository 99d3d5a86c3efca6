"""Memory of CUDA operators that a trace cannot see, because it lies neither in their arguments nor in their results."""

from __future__ import annotations

from collections.abc import Sequence
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
