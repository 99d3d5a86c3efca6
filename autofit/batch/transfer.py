"""Batches on the way to a device, and what they weigh there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from autofit.batch.nest import leaves, map_leaves


def to_device(batch: Any, device: torch.device | str, *, copy: bool = False) -> Any:
    """The batch with every tensor on `device`; what is there already stays itself unless `copy`.

    Copies to CUDA do not block the host when the source is pinned. A packed sequence keeps its `batch_sizes` on the
    CPU, as recurrent modules demand. Non-tensors stay as they are.
    """
    target = torch.device(device)
    non_blocking = target.type == "cuda"  # towards the host it would hand out memory that is not written yet

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(target, non_blocking=non_blocking, copy=copy)
        return _move_packed(leaf, move) if isinstance(leaf, PackedSequence) else leaf

    return map_leaves(move, batch)


def _move_packed(packed: PackedSequence, move: Callable[[Any], Any]) -> PackedSequence:
    data = move(packed.data)  # its own .to() accepts no copy=
    if data is packed.data:
        return packed
    return PackedSequence(data, packed.batch_sizes, move(packed.sorted_indices), move(packed.unsorted_indices))


def batch_bytes(batch: Any) -> int:
    """Bytes that the batch's tensors take on a device, each counted where it occurs.

    An expanded tensor counts in full, because a copy of it is written out. A sparse one counts what it stores.
    """
    return sum(_leaf_bytes(leaf) for _, leaf in leaves(batch))


def _leaf_bytes(leaf: Any) -> int:
    if isinstance(leaf, PackedSequence):
        return sum(part.nbytes for part in leaf if part is not None and part is not leaf.batch_sizes)
    if not isinstance(leaf, torch.Tensor):
        return 0
    if leaf.layout is torch.strided:
        return leaf.nbytes
    return sum(part.nbytes for part in _stored_parts(leaf))


def _stored_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor.values(),)  # nested, ragged: one buffer for all rows
