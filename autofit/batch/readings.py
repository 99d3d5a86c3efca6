"""The ways in which a batch can be read, and the decision between them: one, or an error that lists them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from autofit.batch.nest import entries, has_dims, holds_tensor, join, shown_path
from autofit.batch.nodes import Split
from autofit.batch.overrides import covering
from autofit.errors import ConfigError

_LEAVES_SHOWN = 12
_EXAMPLES_SHOWN = 4


@dataclass(frozen=True)
class Evidence:
    """What a batch shows: its splittable tensors, the lists that may be samples, the sizes that batch_dims settles."""

    tensors: Mapping[str, Any]
    lists: Mapping[str, Any]
    settled: Mapping[str, int]


@dataclass(frozen=True)
class Reading:
    """One way to read a batch: so many samples, in these lists and along dim 0 of all other tensors."""

    samples: int
    lists: frozenset[str] = frozenset()


def collect(batch: Any, chosen: Mapping[str, Split]) -> Evidence:
    """What `batch` shows and what batch_dims, read as `chosen`, settles; ConfigError for what cannot be split."""
    tensors: dict[str, Any] = {}
    lists: dict[str, Any] = {}
    settled: dict[str, int] = {}

    def visit(value: Any, path: str) -> None:
        parts = entries(value)
        if path in chosen:
            split = chosen[path]
            if split is not None:
                _check_splittable(value, path)
                settled[path] = size_of(value, split)
            return
        if parts is None:
            _check_splittable(value, path)
            if has_dims(value):
                tensors[path] = value
            return
        if type(value) is list and path and not holds_tensor(value):
            return  # notes on the samples, whatever they are made of
        if path and _may_be_samples(value) and not any(key.startswith(f"{path}.") for key in chosen):
            lists[path] = value
        for name, part in parts:
            visit(part, join(path, name))

    visit(batch, "")
    return Evidence(tensors, lists, settled)


def _check_splittable(value: Any, path: str) -> None:
    where, choice = shown_path(path), f"batch_dims={{{path!r}: None}}"
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 0) > 0:
        raise ConfigError(
            f"{where} is a NumPy array of shape {value.shape}. Make it a tensor in the collate function "
            f"(torch.from_numpy), or pass {choice} to give every micro-batch all of it."
        )
    if isinstance(value, torch.Tensor) and (value.is_nested or value.layout is not torch.strided):
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise ConfigError(
            f"{where} is a {kind} tensor, which cannot be split into samples. Make it dense in the collate function "
            f"(padded, if its rows differ), or pass {choice} to give every micro-batch all of it."
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


def decide(batch: Any, evidence: Evidence) -> Reading:
    """The one reading that the evidence allows; raises ConfigError when there is none, or more than one."""
    readings = list(_all_readings(evidence))
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


def _all_readings(evidence: Evidence) -> Iterator[Reading]:
    """Every way in which all leaves agree on the number of samples."""
    sizes = {size_of(value) for value in evidence.tensors.values()} | set(evidence.settled.values())
    if len(sizes) == 1:
        yield Reading(sizes.pop())
    for samples in {len(value) for value in evidence.lists.values() if _is_evident(value)}:
        lists = _outermost({path for path, value in evidence.lists.items() if len(value) == samples})
        if not any(_is_evident(evidence.lists[path]) for path in lists):
            continue
        outside = [size_of(v) for path, v in evidence.tensors.items() if covering(path, lists) is None]
        outside += evidence.settled.values()
        if len(lists) + len(outside) > 1 and all(size == samples for size in outside):
            yield Reading(samples, lists)


def size_of(value: Any, split: Split = 0) -> int:
    """Samples of a tensor along the dim `split`, of a packed sequence, or of a list of samples."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    return int(value.shape[split]) if isinstance(split, int) else len(value)


def _outermost(paths: set[str]) -> frozenset[str]:
    return frozenset(path for path in paths if covering(path, paths - {path}) is None)


def shapes(tensors: Mapping[str, Any]) -> str:
    """Paths and shapes for an error message."""
    shown = [f"{shown_path(path)} {_shape(value)}" for path, value in tensors.items()]
    more = len(shown) - _LEAVES_SHOWN
    return ", ".join(shown[:_LEAVES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _shape(value: Any) -> str:
    return f"{size_of(value)} packed" if isinstance(value, PackedSequence) else str(tuple(value.shape))


def _disagreement(evidence: Evidence) -> str:
    samples = _likely_samples(evidence)
    settled = "".join(f" batch_dims gives {shown_path(p)} {n} samples." for p, n in evidence.settled.items())
    return (
        f"The tensors of this batch disagree on the number of samples along dim 0: {shapes(evidence.tensors)}."
        f"{settled} Nothing is guessed: pass batch_dims={{path: dim}} for tensors whose samples lie along another dim, "
        "{path: None} for what belongs to the whole batch, {path: 'list'} for a list whose items are the samples. "
        f"With {samples} samples that may be batch_dims={_example(evidence, samples)}."
    )


def _example(evidence: Evidence, samples: int) -> dict[str, Split]:
    lists = _outermost({path for path, value in evidence.lists.items() if len(value) == samples})
    example: dict[str, Split] = {}
    for path, value in evidence.tensors.items():
        if size_of(value) != samples and len(example) < _EXAMPLES_SHOWN:
            split, home = _guess(value, samples), covering(path, lists)
            example |= {home: "list"} if split is None and home is not None else {path: split}
    return example


def _likely_samples(evidence: Evidence) -> int:
    """The size that most tensors have somewhere; for an example in a message only."""
    if evidence.settled:
        return next(iter(evidence.settled.values()))
    first = Counter(map(size_of, evidence.tensors.values()))
    anywhere = Counter(size for value in evidence.tensors.values() for size in _sizes(value))
    for value in evidence.lists.values():
        anywhere[len(value)] += len(value)
    return max(first, key=lambda size: (size > 1, anywhere[size], first[size]))


def _sizes(value: Any) -> set[int]:
    return set(value.shape) if isinstance(value, torch.Tensor) else {size_of(value)}


def _guess(value: Any, samples: int) -> Split:
    if isinstance(value, torch.Tensor) and samples in value.shape:
        return list(value.shape).index(samples)
    return None


def _ambiguity(readings: list[Reading]) -> str:
    shown = []
    for reading in readings:
        lists = sorted(reading.lists)
        where = f"in the lists {', '.join(lists)}" if lists else "along dim 0 of every tensor"
        choice: Any = dict.fromkeys(lists, "list") if lists else 0
        shown.append(f"{reading.samples} samples {where} (to choose this, pass batch_dims={choice})")
    return f"This batch can be read in {len(shown)} ways, and nothing is guessed: {'; or '.join(shown)}."
