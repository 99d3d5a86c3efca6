"""Where the samples of a batch lie: what is inferred, what `batch_dims` settles, and what is refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

from autofit.batch import infer_layout
from autofit.errors import ConfigError


class Pair(NamedTuple):
    images: Any
    labels: Any


@dataclass(frozen=True)
class Record:
    x: Any
    y: Any
    note: str = "kept"


def images(count: int, *, channels: int = 3) -> list[torch.Tensor]:
    return [torch.rand(channels, 8 + index, 7) for index in range(count)]


def boxes(*counts: int) -> list[dict[str, torch.Tensor]]:
    return [{"boxes": torch.rand(count, 4), "labels": torch.ones(count, dtype=torch.long)} for count in counts]


x, y = torch.rand(6, 5), torch.arange(6)

SPLIT_ALONG_DIM_0 = {
    "tensor": (x, {"": 0}),
    "tuple": ((x, y), {"0": 0, "1": 0}),
    "list that a loader collates": ([x, y], {"0": 0, "1": 0}),
    "namedtuple": (Pair(x, y), {"images": 0, "labels": 0}),
    "dict": ({"x": x, "y": y}, {"x": 0, "y": 0}),
    "ordered dict": (OrderedDict(x=x, y=y), {"x": 0, "y": 0}),
    "frozen dataclass": (Record(x, y), {"x": 0, "y": 0, "note": None}),
    "nest": (({"a": [x, x]}, y), {"0.a.0": 0, "0.a.1": 0, "1": 0}),
    "tensor without dims": ((x, torch.tensor(2.0)), {"0": 0, "1": None}),
    "non-tensors": ({"x": x, "name": "a", "none": None, "n": 3}, {"x": 0, "name": None, "none": None, "n": None}),
    "two inputs of a single sample in a list": ([torch.rand(1, 5), torch.rand(1, 3)], {"0": 0, "1": 0}),
    "views in a list of dicts": (([{"v": x}, {"v": x}], y), {"0.0.v": 0, "0.1.v": 0, "1": 0}),
}


@pytest.mark.parametrize(("batch", "dims"), SPLIT_ALONG_DIM_0.values(), ids=SPLIT_ALONG_DIM_0)
def test_tensors_that_agree_on_dim_0_are_split_along_it(batch: Any, dims: dict[str, Any]) -> None:
    """Tensors of at least one dim are split along dim 0 if all agree; the rest is passed whole."""
    layout = infer_layout(batch)
    assert dict(layout.dims) == dims
    assert layout.samples == layout.samples_in(batch)


LISTS_OF_SAMPLES = {
    "detection": ((images(2), boxes(1, 4)), 2, {"0": "list", "1": "list"}),
    "detection, as zip collates it": ((tuple(images(2)), tuple(boxes(1, 4))), 2, {"0": "list", "1": "list"}),
    "detection, images of one size": (([torch.rand(3, 8, 8)] * 2, boxes(1, 4)), 2, {"0": "list", "1": "list"}),
    "detection, stacked images": ((torch.rand(2, 3, 8, 8), boxes(1, 4)), 2, {"0": 0, "1": "list"}),
    "ragged lengths": (([torch.rand(3), torch.rand(5), torch.rand(4)], torch.rand(3)), 3, {"0": "list", "1": 0}),
    "ragged in a dict": ({"x": [torch.rand(3), torch.rand(5)], "y": torch.rand(2)}, 2, {"x": "list", "y": 0}),
    "ragged lists in a list of views": ([{"v": [x[0], y]}, {"v": [y, x[0]]}], 2, {"0.v": "list", "1.v": "list"}),
    "two ragged lists": (
        ([torch.rand(2), torch.rand(3)], [torch.rand(4), torch.rand(5)]),
        2,
        {"0": "list", "1": "list"},
    ),
    "strings in a list": ({"x": x, "text": list("abcdef")}, 6, {"x": 0, "text": "list"}),
    "strings in a tuple": ((x, tuple("abcdef")), 6, {"0": 0, "1": "list"}),
    "notes in a list": ((x, [{"id": i, "size": (4, i)} for i in range(6)]), 6, {"0": 0, "1": "list"}),
    "arrays in a list": ((x, [np.zeros(i) for i in range(6)]), 6, {"0": 0, "1": "list"}),
}


@pytest.mark.parametrize(("batch", "samples", "dims"), LISTS_OF_SAMPLES.values(), ids=LISTS_OF_SAMPLES)
def test_lists_of_samples_are_split_item_by_item(batch: Any, samples: int, dims: dict[str, Any]) -> None:
    """Lists whose items can only be samples are split as lists when something else has as many."""
    layout = infer_layout(batch)
    assert (layout.samples, dict(layout.dims)) == (samples, dims)


PASSED_WHOLE = {
    "strings, not as many as samples": ((x, ["cat", "dog"]), {"0": 0, "1": None}),
    "numbers in a tuple": ((torch.rand(2, 5), (224, 224)), {"0": 0, "1": None}),
    "size": ((torch.rand(2, 5), torch.Size([7, 9])), {"0": 0, "1": None}),
}


@pytest.mark.parametrize(("batch", "dims"), PASSED_WHOLE.values(), ids=PASSED_WHOLE)
def test_what_is_not_one_per_sample_is_passed_whole(batch: Any, dims: dict[str, Any]) -> None:
    """Sequences without tensors are split only if they can hold one item per sample."""
    assert dict(infer_layout(batch).dims) == dims


def test_strings_that_a_loader_collates_go_along_with_their_samples() -> None:
    """The default collate function leaves strings in a tuple; each part gets its own."""
    batch = default_collate([(torch.tensor(float(i)), f"s{i}") for i in range(4)])
    layout = infer_layout(batch)
    assert [part[1] for part in layout.split(batch, [3, 1])] == [("s0", "s1", "s2"), ("s3",)]


sequence_first = (torch.rand(9, 6, 2), torch.arange(6))
lstm = (torch.rand(2, 9, 5), (torch.rand(1, 2, 8), torch.rand(1, 2, 4)))

CHOSEN = {
    "one dim for all": ((torch.rand(9, 6, 2), torch.rand(9, 6)), 1, 6, {"0": 1, "1": 1}),
    "negative dim": (sequence_first, {"0": -2}, 6, {"0": 1, "1": 0}),
    "passed whole": ({"x": x, "positions": torch.rand(1, 5)}, {"positions": None}, 6, {"x": 0, "positions": None}),
    "all that is in a container": (lstm, {"1": 1}, 2, {"0": 0, "1.0": 1, "1.1": 1}),
    "a longer path wins": (
        (torch.rand(2, 9), {"a": torch.rand(7, 2), "b": torch.rand(3)}),
        {"1": 1, "1.b": None},
        2,
        {"0": 0, "1.a": 1, "1.b": None},
    ),
    "list of samples": ((images(2), torch.arange(2)), {"0": "list"}, 2, {"0": "list", "1": 0}),
    "one of two readings": ((images(3), boxes(3, 3, 3)), {"0": "list", "1": "list"}, 3, {"0": "list", "1": "list"}),
    "the other of two": (([x[:2], x[:2, :3]], boxes(2, 2)), 0, 2, {"0.0": 0, "0.1": 0, "1.0.boxes": 0}),
    "the batch is a list of samples": (boxes(1, 4, 2), "list", 3, {"": "list"}),
    "strings, passed whole": ((x, list("abcdef")), {"1": None}, 6, {"0": 0, "1": None}),
    "a container, passed whole": ((x, {"a": y, "b": [x]}), {"1": None}, 6, {"0": 0, "1": None}),
    "all but one": ((x, {"a": y, "b": torch.rand(6)}), {"1": None, "1.b": 0}, 6, {"0": 0, "1.a": None, "1.b": 0}),
    "sparse, passed whole": ((x, torch.eye(3).to_sparse()), {"1": None}, 6, {"0": 0, "1": None}),
    "array, passed whole": ((x, np.zeros(3)), {"1": None}, 6, {"0": 0, "1": None}),
}


@pytest.mark.parametrize(("batch", "batch_dims", "samples", "dims"), CHOSEN.values(), ids=CHOSEN)
def test_batch_dims_settle_what_they_name(batch: Any, batch_dims: Any, samples: int, dims: dict[str, Any]) -> None:
    """A dim for all tensors, or a dict from paths; the rest follows the rules."""
    layout = infer_layout(batch, batch_dims=batch_dims)
    assert layout.samples == samples
    assert dims.items() <= dict(layout.dims).items()


REFUSED = {
    "sequence first": (sequence_first, None, ["0 (9, 6, 2), 1 (6,)", "batch_dims={'0': 1}"]),
    "positions of all samples": ({"x": x, "p": torch.rand(1, 5)}, None, ["p (1, 5)", "batch_dims={'p': None}"]),
    "hidden states of two samples": (lstm, None, ["1.0 (1, 2, 8)", "batch_dims={'1.0': 1, '1.1': 1}"]),
    "images that only differ in size": ((images(2), torch.arange(2)), None, ["0.0 (3, 8, 7)", "={'0': 'list'}"]),
    "three images of three channels": ((images(3), boxes(3, 3, 3)), None, ["2 ways", "'1': 'list'"]),
    "one ragged list, nothing beside it": (([torch.rand(2), torch.rand(3)], 1), None, ["0.0 (2,), 0.1 (3,)"]),
    "ragged tuple": (((torch.rand(2), torch.rand(3)), torch.rand(2)), None, ["0.0 (2,), 0.1 (3,), 1 (2,)"]),
    "different keys": (([{"a": torch.rand(3)}, {"b": torch.rand(4)}], torch.rand(2)), None, ["0.0.a (3,), 0.1.b (4,)"]),
    "nothing to split": (("a", {"b": 1}), None, ["nothing to split", "tuple"]),
    "numbers only": (torch.tensor(1.0), None, ["nothing to split"]),
    "no samples": ((torch.rand(0, 5), torch.rand(0)), None, ["no samples", "0 (0, 5)"]),
    "everything passed whole": (x, {"": None}, ["nothing to split"]),
    "sparse": ((x, torch.eye(6).to_sparse()), None, ["1 is a sparse_coo tensor", "{'1': None}"]),
    "sparse, dim chosen": ((x, torch.eye(6).to_sparse()), {"1": 0}, ["1 is a sparse_coo tensor"]),
    "array": ((x, np.zeros((6, 2))), None, ["1 is a NumPy array of shape (6, 2)", "from_numpy"]),
    "unknown path": ({"x": x}, {"z": 1}, ["'z'", "'x'"]),
    "dim that is not there": (sequence_first, 1, ["1, which has 1: (6,)"]),
    "dim of a number": ((x, torch.tensor(1.0)), {"1": 0}, ["holds no tensor with dims"]),
    "list that is none": ({"x": x}, {"x": "list"}, ["'list' for x, which is a Tensor"]),
    "float": (x, 0.5, ["batch_dims got 0.5", "Allowed"]),
    "bool": (x, {"": True}, ["batch_dims got True"]),
    "settled sizes disagree": ((x, torch.rand(4, 7)), {"1": 1}, ["disagree", "batch_dims gives 1 7 samples"]),
}


@pytest.mark.parametrize(("batch", "batch_dims", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_meant_is_refused_with_what_to_pass(batch: Any, batch_dims: Any, said: list[str]) -> None:
    """Nothing is guessed: the error names paths and shapes, and what to pass as batch_dims."""
    with pytest.raises(ConfigError) as caught:
        infer_layout(batch, batch_dims=batch_dims)
    for words in said:
        assert words in str(caught.value)


def test_nested_tensors_are_refused() -> None:
    """A ragged nested tensor is refused with advice to pad it."""
    ragged = torch.nested.nested_tensor([torch.rand(2), torch.rand(3)], layout=torch.jagged)
    with pytest.raises(ConfigError, match=r"nested tensor, which cannot be split.*padded"):
        infer_layout((torch.rand(2), ragged))


def test_a_packed_sequence_counts_its_sequences() -> None:
    """A packed sequence has as many samples as sequences, not as time steps."""
    packed = pack_sequence([torch.rand(4, 2), torch.rand(3, 2), torch.rand(1, 2)])
    layout = infer_layout((packed, torch.arange(3)))
    assert (layout.samples, dict(layout.dims)) == (3, {"0": "list", "1": 0})
    with pytest.raises(ConfigError, match="0 3 packed"):
        infer_layout((packed, torch.arange(4)))


class ReadOnly(Mapping[str, Any]):
    """A Mapping that allows neither items to be set nor itself to be made from a dict."""

    def __init__(self, **items: Any) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Any:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def test_a_mapping_that_cannot_be_rebuilt_is_refused() -> None:
    """The error names the type and the way out."""
    batch = ReadOnly(x=x, y=y)
    with pytest.raises(ConfigError, match=r"ReadOnly.*dict\(…\)"):
        infer_layout(batch).split(batch, [3, 3])


def test_the_description_says_what_is_split_and_what_is_not() -> None:
    """One sentence names every leaf and how it is treated."""
    batch = {"x": x, "time_first": torch.rand(9, 6), "text": list("abcdef"), "scale": torch.tensor(2.0), "name": "a"}
    assert infer_layout(batch, batch_dims={"time_first": 1}).describe() == (
        "The batch is split into samples: x along dim 0; time_first along dim 1; text as a list of samples; "
        "passed whole: scale, name."
    )
    assert infer_layout(x).describe() == "The batch is split into samples: the batch itself along dim 0."
    assert "x7 and 2 more along dim 0" in infer_layout({f"x{i}": x for i in range(10)}).describe()
