"""Find where the samples of a batch lie. What is ambiguous is refused, never guessed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import PackedSequence

from autofit.batch.layout import BatchLayout
from autofit.batch.nest import entries, has_dims, holds_tensor, join, shown_path
from autofit.batch.nodes import Along, Container, Node, Packed, Samples, Split, Whole
from autofit.batch.overrides import covering, read_batch_dims
from autofit.errors import ConfigError

_LEAVES_SHOWN = 12


def infer_layout(batch: Any, *, batch_dims: int | Literal["list"] | Mapping[str, Split] | None = None) -> BatchLayout:
    """Where the samples of `batch` lie.

    Tensors: along dim 0, if all of at least one dim agree on its size. Tensors without dims and non-tensors are passed
    whole.

    Lists of samples: a list or tuple of n Mappings with the same keys, or a list of n tensors of different lengths, is
    split item by item if something outside it has n samples too; a list or tuple of n tensors beside it is then one as
    well (detection: images and their targets). The batch itself is never taken for one. Strings in a list or tuple, and
    other items without tensors in a list, go along with the samples if there are exactly n of them.

    `batch_dims` decides instead: a dim for all tensors, or a dict from paths (`"1.labels"`; a container's path stands
    for all tensors in it) to a dim, None (pass whole) or `"list"` (its items are the samples). What the dict leaves out
    follows the rules above.

    Raises ConfigError when tensors disagree, when both readings hold (three images of three channels), when a tensor is
    sparse or nested, and when there is nothing to split.
    """
    chosen = read_batch_dims(batch, batch_dims)
    evidence = _collect(batch, chosen)
    reading = _decide(batch, evidence)
    if reading.samples == 0:
        raise ConfigError(f"The batch has no samples: {_shapes(evidence.tensors, chosen)}.")
    return BatchLayout(samples=reading.samples, root=_node(batch, "", chosen, reading))


@dataclass(frozen=True)
class _Evidence:
    """What a batch shows: its splittable tensors, the lists that may be samples, the sizes that batch_dims settles."""

    tensors: Mapping[str, Any]
    lists: Mapping[str, Any]
    settled: Mapping[str, int]


@dataclass(frozen=True)
class _Reading:
    """One way to read a batch: so many samples, in these lists and along dim 0 of all other tensors."""

    samples: int
    lists: frozenset[str] = frozenset()


def _collect(batch: Any, chosen: Mapping[str, Split]) -> _Evidence:
    tensors: dict[str, Any] = {}
    lists: dict[str, Any] = {}
    settled: dict[str, int] = {}

    def visit(value: Any, path: str) -> None:
        parts = entries(value)
        if path in chosen and (parts is None or chosen[path] == "list"):
            split = chosen[path]
            if split is not None:
                _check_splittable(value, path)
                settled[path] = _size(value, split)
            return
        if parts is None:
            if has_dims(value):
                _check_splittable(value, path)
                tensors[path] = value
            return
        if path and _may_be_samples(value) and not any(key.startswith(f"{path}.") for key in chosen):
            lists[path] = value
        for name, part in parts:
            visit(part, join(path, name))

    visit(batch, "")
    return _Evidence(tensors, lists, settled)


def _check_splittable(value: Any, path: str) -> None:
    if not isinstance(value, torch.Tensor):
        return
    if value.is_nested or value.layout is not torch.strided:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise ConfigError(
            f"{shown_path(path)} is a {kind} tensor, which cannot be split into samples. Make it dense in the collate "
            f"function (padded, if its rows differ), or pass batch_dims={{{path!r}: None}} to give every micro-batch "
            "all of it."
        )


def _may_be_samples(value: Any) -> bool:
    """A list or tuple of tensors, or of Mappings with the same keys."""
    if type(value) not in (list, tuple) or not value:
        return False
    return all(isinstance(item, torch.Tensor) for item in value) or _are_records(value)


def _are_records(value: Any) -> bool:
    if not all(isinstance(item, Mapping) and holds_tensor(item) for item in value):
        return False
    return len({frozenset(item) for item in value}) == 1


def _is_evident(value: Any) -> bool:
    """Whether a list that may be samples can hardly be anything else: records, or tensors of different lengths."""
    if isinstance(value[0], Mapping):
        return True
    lengths = {tuple(item.shape[:1]) for item in value}
    return type(value) is list and len(lengths) > 1


def _decide(batch: Any, evidence: _Evidence) -> _Reading:
    readings = list(_readings(evidence))
    if len(readings) == 1:
        return readings[0]
    if readings:
        raise ConfigError(_ambiguity(readings))
    if not evidence.tensors and not evidence.settled:
        raise ConfigError(
            f"There is nothing to split in this batch ({type(batch).__name__}): it holds no tensor of at least one dim "
            "that batch_dims does not pass whole. Allowed: any nest of tensors, tuples, lists, dicts and dataclasses."
        )
    raise ConfigError(_disagreement(evidence))


def _readings(evidence: _Evidence) -> Iterator[_Reading]:
    """Every way in which all leaves agree on the number of samples."""
    sizes = {_size(value) for value in evidence.tensors.values()} | set(evidence.settled.values())
    if len(sizes) == 1:
        yield _Reading(sizes.pop())
    for samples in {len(value) for value in evidence.lists.values() if _is_evident(value)}:
        lists = _outermost({path for path, value in evidence.lists.items() if len(value) == samples})
        if not any(_is_evident(evidence.lists[path]) for path in lists):
            continue
        outside = [_size(v) for path, v in evidence.tensors.items() if covering(path, lists) is None]
        outside += evidence.settled.values()
        if len(lists) + len(outside) > 1 and all(size == samples for size in outside):
            yield _Reading(samples, lists)


def _size(value: Any, split: Split = 0) -> int:
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    return int(value.shape[split]) if isinstance(split, int) else len(value)


def _outermost(paths: set[str]) -> frozenset[str]:
    return frozenset(path for path in paths if covering(path, paths - {path}) is None)


def _node(value: Any, path: str, chosen: Mapping[str, Split], reading: _Reading) -> Node:
    if path in chosen:
        split = chosen[path]
        if split == "list":
            return Packed(path) if isinstance(value, PackedSequence) else Samples(path)
        if split is not None:
            return Along(path, split, value.ndim)
        return Whole(path, chosen=True)
    if path in reading.lists or (path and _goes_along(value, reading.samples)):
        return Samples(path)
    parts = entries(value)
    if parts is not None:
        nodes = tuple(_node(part, join(path, name), chosen, reading) for name, part in parts)
        if all(isinstance(node, Whole) and not node.chosen for node in nodes):
            return Whole(path)
        return Container(type(value), tuple(name for name, _ in parts), nodes)
    if isinstance(value, PackedSequence):
        return Packed(path)
    return Along(path, 0, value.ndim) if has_dims(value) else Whole(path)


def _goes_along(value: Any, samples: int) -> bool:
    """Whether a sequence without tensors has one item per sample. Collating strings gives a tuple of them."""
    if type(value) not in (list, tuple) or len(value) != samples or holds_tensor(value):
        return False
    return type(value) is list or all(isinstance(item, (str, bytes)) for item in value)


def _shapes(tensors: Mapping[str, Any], chosen: Mapping[str, Split]) -> str:
    shown = [f"{shown_path(path)} {_shape(value)}" for path, value in tensors.items()]
    shown += [f"{shown_path(path)} by batch_dims" for path, split in chosen.items() if split is not None]
    more = len(shown) - _LEAVES_SHOWN
    return ", ".join(shown[:_LEAVES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _shape(value: Any) -> str:
    return f"{_size(value)} packed" if isinstance(value, PackedSequence) else str(tuple(value.shape))


def _disagreement(evidence: _Evidence) -> str:
    samples = _likely_samples(evidence)
    settled = "".join(f" batch_dims gives {shown_path(p)} {n} samples." for p, n in evidence.settled.items())
    odd = [path for path, value in evidence.tensors.items() if _size(value) != samples]
    lists = [path for path, value in evidence.lists.items() if len(value) == samples]
    example: dict[str, Split] = dict.fromkeys(_outermost(set(lists)), "list")
    example |= {p: _guess(evidence.tensors[p], samples) for p in odd if covering(p, example) is None}
    return (
        f"The tensors of this batch disagree on the number of samples along dim 0: {_shapes(evidence.tensors, {})}."
        f"{settled} Nothing is guessed: pass batch_dims={{path: dim}} for tensors whose samples lie along another dim, "
        "{path: None} for what belongs to the whole batch, {path: 'list'} for a list whose items are the samples. "
        f"With {samples} samples that may be batch_dims={dict(list(example.items())[:4])}."
    )


def _likely_samples(evidence: _Evidence) -> int:
    """The size that most tensors have somewhere; for an example in a message only."""
    if evidence.settled:
        return next(iter(evidence.settled.values()))
    first = Counter(map(_size, evidence.tensors.values()))
    anywhere = Counter(size for value in evidence.tensors.values() for size in _sizes(value))
    return max(first, key=lambda size: (size > 1, anywhere[size], first[size]))


def _sizes(value: Any) -> set[int]:
    return set(value.shape) if isinstance(value, torch.Tensor) else {_size(value)}


def _guess(value: Any, samples: int) -> Split:
    if isinstance(value, torch.Tensor) and value.shape[0] != 1 and samples in value.shape:
        return list(value.shape).index(samples)
    return None


def _ambiguity(readings: list[_Reading]) -> str:
    shown = []
    for reading in readings:
        lists = sorted(reading.lists)
        where = f"in the lists {', '.join(lists)}" if lists else "along dim 0 of every tensor"
        choice: Any = dict.fromkeys(lists, "list") if lists else 0
        shown.append(f"{reading.samples} samples {where} (to choose this, pass batch_dims={choice})")
    return f"This batch can be read in {len(shown)} ways, and nothing is guessed: {'; or '.join(shown)}."
