"""Activations that wait for backward in host memory: slow to fetch, but no byte of the device's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

Forward = Callable[..., Any]
_Packed = torch.Tensor | tuple[torch.device, torch.Tensor]

# How many casts and views may lie between a weight and what a layer saves of it.
_STEPS_FROM_WEIGHT = 3


def offloaded(forward: Forward, *, modules: Sequence[nn.Module]) -> Forward:
    """`forward`, of which what it saves for backward is moved to the host, weights and buffers of `modules` apart.

    As `torch.autograd.graph.save_on_cpu`, which moves the weights too. Host memory is pinned where CUDA is there.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        resident = {
            tensor.untyped_storage()._cdata
            for module in modules
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        }

        def pack(tensor: torch.Tensor) -> _Packed:
            stays = tensor.device.type == "cpu" or tensor.untyped_storage()._cdata in resident or _is_weight(tensor)
            return tensor if stays else (tensor.device, _on_host(tensor))

        with saved_tensors_hooks(pack, _fetched):
            return forward(*args, **kwargs)

    run.__wrapped__ = forward  # type: ignore[attr-defined]  # inspect.signature finds it
    return run


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    pinned = torch.cuda.is_available() and not tensor.is_sparse
    host = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=pinned)
    return host.copy_(tensor, non_blocking=pinned)


def _fetched(packed: _Packed) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    device, host = packed
    return host.to(device, non_blocking=host.is_pinned() if torch.cuda.is_available() else False)


def _is_weight(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a parameter's cast or view, which autocast keeps on the device anyway."""
    node = tensor.grad_fn
    if node is None:
        return tensor.is_leaf and tensor.requires_grad
    for _ in range(_STEPS_FROM_WEIGHT):
        edges = [following for following, _ in node.next_functions if following is not None]
        if len(edges) != 1 or len(node.next_functions) != 1:
            return False
        node = edges[0]
        if node.name().endswith("AccumulateGrad"):
            return True
    return False
