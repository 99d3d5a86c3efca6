"""Moving batches, and what they weigh."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from autofit.batch import batch_bytes, to_device


class Pair(NamedTuple):
    x: Any
    y: Any


BATCH = ({"x": torch.rand(4, 2), "name": "a"}, Pair(torch.arange(4), None), [torch.tensor(1.5)])


def test_a_batch_that_is_there_already_stays_itself() -> None:
    """Nothing is copied or rebuilt without need."""
    assert to_device(BATCH, "cpu") is BATCH


def test_a_forced_copy_shares_no_memory() -> None:
    """With copy=True every tensor is new, in the same nest, and the rest is the same object."""
    moved = to_device(BATCH, torch.device("cpu"), copy=True)
    assert torch.equal(moved[0]["x"], BATCH[0]["x"])
    assert moved[0]["x"].data_ptr() != BATCH[0]["x"].data_ptr()
    assert isinstance(moved[1], Pair)
    assert moved[0]["name"] is BATCH[0]["name"]


def test_a_batch_moves_to_another_device() -> None:
    """Every tensor moves; non-tensors stay."""
    moved = to_device(BATCH, "meta")
    assert {moved[0]["x"].device.type, moved[1].x.device.type, moved[2][0].device.type} == {"meta"}
    assert (moved[0]["name"], moved[1].y) == ("a", None)


def test_packed_sequences_keep_their_batch_sizes_on_the_host() -> None:
    """Recurrent modules demand it."""
    moved = to_device(pack_sequence([torch.rand(3), torch.rand(2)]), "meta")
    assert isinstance(moved, PackedSequence)
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")


ragged = torch.nested.nested_tensor([torch.rand(2), torch.rand(3)], layout=torch.jagged)
SIZES = {
    "nest": (BATCH, 4 * 2 * 4 + 4 * 8 + 4),
    "expanded": (torch.rand(1, 3).expand(5, 3), 5 * 3 * 4),
    "view": (torch.rand(8, 3)[:2], 2 * 3 * 4),
    "sparse": (torch.eye(3).to_sparse(), 2 * 3 * 8 + 3 * 4),
    "ragged": (ragged, 5 * 4),
    "packed": (pack_sequence([torch.rand(3), torch.rand(2)]), 5 * 4),
    "packed, unsorted": (pack_sequence([torch.rand(2), torch.rand(3)], enforce_sorted=False), 5 * 4 + 2 * 2 * 8),
    "nothing": (("a", None, 3), 0),
}


@pytest.mark.parametrize(("batch", "expected"), SIZES.values(), ids=SIZES)
def test_bytes_of_a_batch(batch: Any, expected: int) -> None:
    """What its tensors hold, not what lies behind them."""
    assert batch_bytes(batch) == expected


@pytest.mark.filterwarnings("ignore:Sparse C:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_bytes_of_compressed_tensors(layout: torch.layout) -> None:
    """Compressed rows or columns count their pointers, indices and values."""
    assert batch_bytes(torch.eye(3).to_sparse(layout=layout)) == (4 + 3) * 8 + 3 * 4
