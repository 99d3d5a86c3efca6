"""Splitting and resizing batches of any shape."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from autofit.batch import BatchLayout, infer_layout
from autofit.batch.nest import entries, leaves
from autofit.errors import ConfigError


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class Record:
    x: Any
    y: Any
    made: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "made", self.made + 1)


@dataclass
class Numbered:
    """A batch of n samples whose every value is the number of its sample, and how to read it."""

    batch: Any
    batch_dims: Any = None


def numbered(shape: tuple[int, ...], dim: int) -> torch.Tensor:
    """A tensor in which everything that belongs to sample i is i."""
    sizes = [1] * len(shape)
    sizes[dim] = shape[dim]
    return torch.arange(shape[dim]).reshape(sizes).expand(shape).clone()


def batch_in(kind: str, n: int) -> Numbered:
    x, y = numbered((n, 2, 3), 0), numbered((n,), 0)
    sequence_first = numbered((4, n), 1)
    return {
        "tensor": Numbered(x),
        "list": Numbered([x, y]),
        "namedtuple": Numbered(Pair(x, {"y": y, "note": "n"})),
        "dict": Numbered(OrderedDict(x=x, y=y, scale=torch.tensor(0.5))),
        "user dict": Numbered(UserDict({"x": x, "y": (y, None)})),
        "frozen dataclass": Numbered(Record(x, (y,))),
        "sequence first": Numbered({"t": sequence_first, "y": y}, {"t": 1}),
        "list of samples": Numbered(
            (
                [torch.full((2 + i, 2), i) for i in range(n)],
                [{"b": torch.full((i % 3, 4), i), "i": i} for i in range(n)],
            ),
            {"0": "list", "1": "list"},
        ),
        "strings": Numbered((y, [str(i) for i in range(n)], tuple(str(i) for i in range(n)))),
        "packed": Numbered((pack_sequence([torch.full((n - i,), i) for i in range(n)]), y)),
    }[kind]


KINDS = (
    "tensor",
    "list",
    "namedtuple",
    "dict",
    "user dict",
    "frozen dataclass",
    "sequence first",
    "list of samples",
    "strings",
    "packed",
)


def samples_of(value: Any, layout: BatchLayout) -> list[set[int]]:
    """For every leaf that is split the numbers of its samples in order, checked to be whole samples."""
    by_path: dict[str, Any] = {}

    def visit(node: Any, path: str) -> None:
        by_path[path] = node
        for name, part in entries(node) or []:
            visit(part, f"{path}.{name}" if path else name)

    visit(value, "")
    found = []
    for path, split in layout.dims:
        if split is None:
            continue
        leaf = by_path[path]
        if split == "list":
            items = unpack_sequence(leaf) if hasattr(leaf, "batch_sizes") else leaf
        else:
            items = leaf.unbind(split)
        found.append([_number(item) for item in items])
    return found


def _number(item: Any) -> int | None:
    if isinstance(item, str):
        return int(item)
    if isinstance(item, dict):
        return item["i"]
    (number,) = {int(value) for value in item.flatten()}
    return number


@st.composite
def sizes_of_parts(draw: st.DrawFn) -> list[int]:
    return draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))


@settings(max_examples=100, deadline=None)
@given(kind=st.sampled_from(KINDS), sizes=sizes_of_parts())
def test_parts_are_consecutive_and_complete(kind: str, sizes: list[int]) -> None:
    """Parts have the sizes asked for, keep the order, and together are the batch, in every leaf alike."""
    made = batch_in(kind, sum(sizes))
    layout = infer_layout(made.batch, batch_dims=made.batch_dims)
    parts = layout.split(made.batch, sizes)
    assert [layout.samples_in(part) for part in parts] == sizes
    assert all(type(part) is type(made.batch) for part in parts)
    assert all(layout.matches(part) for part in parts)
    for whole, *pieces in zip(samples_of(made.batch, layout), *(samples_of(p, layout) for p in parts), strict=True):
        assert whole == list(range(sum(sizes))) == [number for piece in pieces for number in piece]


@settings(max_examples=100, deadline=None)
@given(kind=st.sampled_from(KINDS), n=st.integers(1, 6), samples=st.integers(1, 20))
def test_resizing_cuts_or_repeats_whole_samples(kind: str, n: int, samples: int) -> None:
    """The result has exactly the samples asked for: the first ones, or all of them again and again."""
    made = batch_in(kind, n)
    layout = infer_layout(made.batch, batch_dims=made.batch_dims)
    resized = layout.resize(made.batch, samples)
    assert layout.samples_in(resized) == samples
    assert type(resized) is type(made.batch)
    assert layout.matches(resized)
    for numbers in samples_of(resized, layout):
        assert numbers == [index % n for index in range(samples)]


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 6), samples=st.integers(1, 13))
def test_resizing_back_and_forth_keeps_the_first_samples(n: int, samples: int) -> None:
    """What both sizes have in common survives."""
    batch = (torch.rand(n, 3), torch.arange(n))
    layout = infer_layout(batch)
    there = layout.resize(batch, samples)
    kept = min(n, samples)
    assert torch.equal(layout.resize(there, n)[0][:kept], batch[0][:kept])


def test_parts_are_views() -> None:
    """Splitting copies nothing, along any dim."""
    batch = {"x": torch.rand(6, 2), "t": torch.rand(3, 6)}
    layout = infer_layout(batch, batch_dims={"t": 1})
    for part in layout.split(batch, [4, 2]):
        for path, leaf in leaves(part):
            assert leaf.untyped_storage().data_ptr() == batch[path].untyped_storage().data_ptr()


def test_parts_carry_gradients_to_an_input_that_requires_them() -> None:
    """Gradients of the parts meet in the batch's own leaf."""
    x = torch.rand(4, 2, requires_grad=True)
    layout = infer_layout((x, torch.arange(4)))
    for part, _ in layout.split((x, torch.arange(4)), [3, 1]):
        (2 * part).sum().backward()
    assert torch.equal(x.grad, torch.full((4, 2), 2.0))


@pytest.mark.parametrize("samples", [2, 4, 5, 12])
def test_a_resized_batch_is_detached_and_requires_grad_like_the_batch(samples: int) -> None:
    """Trials never write gradients into the user's own tensors."""
    x = torch.rand(4, 2, requires_grad=True)
    layout = infer_layout((x, torch.rand(4)))
    big, other = layout.resize((x, torch.rand(4)), samples)
    assert (big.is_leaf, big.requires_grad, other.requires_grad) == (True, True, False)
    big.sum().backward()
    assert x.grad is None


@pytest.mark.parametrize("samples", [1, 3, 4, 7, 8])
def test_channels_last_survives(samples: int) -> None:
    """The memory format stays through splitting and resizing."""
    batch = torch.rand(4, 3, 5, 5).to(memory_format=torch.channels_last)
    layout = infer_layout(batch)
    assert layout.resize(batch, samples).is_contiguous(memory_format=torch.channels_last)
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in layout.split(batch, [3, 1]))


@pytest.mark.parametrize(("samples", "rows"), [(2, 2), (9, 9)])
def test_a_resized_batch_takes_memory_of_its_own_size(samples: int, rows: int) -> None:
    """A small batch does not keep a large one's memory alive, along any dim."""
    layout = infer_layout(torch.rand(3, 4), batch_dims=1)
    assert layout.resize(torch.rand(3, 4), samples).untyped_storage().nbytes() == 3 * rows * 4


def test_repeated_list_samples_do_not_share_memory() -> None:
    """A batch tiled from lists weighs what a real one would."""
    batch = ([torch.rand(2), torch.rand(3)], torch.arange(2))
    resized, _ = infer_layout(batch).resize(batch, 4)
    assert len({item.data_ptr() for item in resized}) == 4


def test_what_a_mapping_carries_beside_its_items_stays() -> None:
    """Subclasses and attributes of Mappings survive, read-only views of dicts too."""
    factory = defaultdict(list, x=torch.rand(4, 2))
    part = infer_layout(factory).split(factory, [1, 3])[1]
    assert part.default_factory is list
    proxy = MappingProxyType({"x": torch.rand(4, 2)})
    part = infer_layout(proxy).split(proxy, [1, 3])[1]
    assert (type(part), len(part["x"])) == (MappingProxyType, 3)


def test_dataclasses_are_rebuilt_without_running_their_init() -> None:
    """Fields that are not arguments keep their value; __post_init__ does not run again."""
    record = Record(torch.rand(4, 2), "note")
    part = infer_layout(record).split(record, [1, 3])[0]
    assert (part.made, part.y, len(part.x)) == (1, "note", 1)


@pytest.mark.parametrize("sorted_", [True, False])
def test_packed_sequences_keep_their_samples_apart(sorted_: bool) -> None:
    """Parts of a packed sequence are its sequences in their original order, sorted or not."""
    lengths = [3, 2, 1] if sorted_ else [1, 3, 2]
    sequences = [torch.full((length,), float(length)) for length in lengths]
    packed = pack_sequence(sequences, enforce_sorted=sorted_)
    layout = infer_layout(packed)
    first, second = layout.split(packed, [2, 1])
    assert (first.sorted_indices is None) == sorted_
    assert [len(s) for part in (first, second) for s in unpack_sequence(part)] == lengths
    assert [len(s) for s in unpack_sequence(layout.resize(packed, 5))] == [*lengths, *lengths[:2]]


@pytest.mark.parametrize("sizes", [[], [4], [7], [0, 6], [7, -1], [3, 2]])
def test_sizes_must_add_up_to_the_samples(sizes: list[int]) -> None:
    """No sample is lost, taken twice or made up."""
    batch = torch.rand(6, 2)
    with pytest.raises(ConfigError, match="6 samples was to be split"):
        infer_layout(batch).split(batch, sizes)


def test_resizing_to_nothing_is_refused() -> None:
    """A batch keeps at least one sample."""
    with pytest.raises(ConfigError, match="at least 1"):
        infer_layout(torch.rand(6)).resize(torch.rand(6), 0)


def test_the_last_batch_of_an_epoch_uses_the_same_layout() -> None:
    """Another number of samples is fine; leaves that disagree and empty batches are named."""
    layout = infer_layout({"x": torch.rand(6, 2), "names": list("abcdef")})
    assert layout.samples_in({"x": torch.rand(2, 2), "names": ["a", "b"]}) == 2
    with pytest.raises(ConfigError, match="x has 2, names has 6"):
        layout.samples_in({"x": torch.rand(2, 2), "names": list("abcdef")})
    with pytest.raises(ConfigError, match="no samples: x is empty"):
        layout.samples_in({"x": torch.rand(0, 2), "names": []})


x, y = torch.rand(6, 5), torch.arange(6)
BASE = ({"x": x, "y": y}, [x], 1.0)
MATCHES = {
    "other sizes": (({"x": torch.rand(2, 9), "y": torch.rand(2)}, [torch.rand(2, 5)], 2.0), True),
    "other key": (({"x": x, "z": y}, [x], 1.0), False),
    "fewer items": (({"x": x, "y": y}, [], 1.0), False),
    "other container": (({"x": x, "y": y}, (x,), 1.0), False),
    "more dims": (({"x": x[None], "y": y}, [x], 1.0), False),
    "no tensor": (({"x": 1, "y": y}, [x], 1.0), False),
    "a tensor where there was none": (({"x": x, "y": y}, [x], x), False),
    "a number without dims where there was none": (({"x": x, "y": y}, [x], torch.tensor(1.0)), True),
    "only a tensor": (x, False),
}


@pytest.mark.parametrize(("batch", "expected"), MATCHES.values(), ids=MATCHES)
def test_a_layout_knows_its_structure(batch: Any, expected: bool) -> None:
    """Containers, keys and numbers of dims count; sizes do not."""
    assert infer_layout(BASE).matches(batch) is expected


def test_what_batch_dims_pass_whole_matches_whatever_it_is() -> None:
    """Also where nothing else is in its container."""
    batch = (x, {"positions": torch.rand(1, 5)})
    layout = infer_layout(batch, batch_dims={"1.positions": None})
    assert layout.matches(batch)
    assert layout.matches((x, {"positions": None}))


def test_lists_of_samples_match_whatever_their_length() -> None:
    """The last batch of an epoch may have fewer images; a tensor in their place is another structure."""
    batch = ([torch.rand(3), torch.rand(4)], torch.arange(2))
    layout = infer_layout(batch)
    assert layout.matches(([torch.rand(9)], torch.arange(1)))
    assert not layout.matches((torch.rand(2, 9), torch.arange(2)))
