"""The parts of a batch layout: how each kind of leaf or container is counted, split and resized."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, Protocol

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from autofit.batch.nest import entries, has_dims, leaves, map_leaves, rebuild

# How one leaf is split: along a dim, as a list of samples, or not at all.
Split = int | Literal["list"] | None


class Node(Protocol):
    """One part of a batch: how its samples are counted, split and resized."""

    def splits(self) -> Iterator[tuple[str, Split]]:
        """Path and split of every leaf below."""

    def counts(self, value: Any) -> Iterator[tuple[str, int]]:
        """Path and number of samples of every leaf that is split."""

    def matches(self, value: Any) -> bool:
        """Whether `value` has the structure that this node was made for."""

    def split(self, value: Any, sizes: Sequence[int]) -> Sequence[Any]:
        """One part for each size."""

    def resize(self, value: Any, samples: int) -> Any:
        """The part with exactly `samples` samples."""


@dataclass(frozen=True)
class Along:
    """A tensor whose samples lie along one dim."""

    path: str
    dim: int
    ndim: int

    def splits(self) -> Iterator[tuple[str, Split]]:
        yield self.path, self.dim

    def counts(self, value: Any) -> Iterator[tuple[str, int]]:
        yield self.path, value.shape[self.dim]

    def matches(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.ndim == self.ndim

    def split(self, value: Any, sizes: Sequence[int]) -> Sequence[Any]:
        parts: Sequence[Any] = value.split_with_sizes(list(sizes), self.dim)  # half the time of torch.split
        return parts

    def resize(self, value: Any, samples: int) -> Any:
        source = value.detach()
        times, rest = divmod(samples, source.shape[self.dim])
        if times == 0:
            # its own memory, as a batch of this size has; the strides keep their order, channels_last included
            resized = source.narrow(self.dim, 0, rest).clone(memory_format=torch.preserve_format)
        elif samples == source.shape[self.dim]:
            resized = source
        else:
            pieces = [source] * times + ([source.narrow(self.dim, 0, rest)] if rest else [])
            resized = torch.cat(pieces, dim=self.dim)
        return resized.requires_grad_(value.requires_grad)


@dataclass(frozen=True)
class Packed:
    """A packed sequence: samples are its sequences, in the order in which they were packed."""

    path: str

    def splits(self) -> Iterator[tuple[str, Split]]:
        yield self.path, "list"

    def counts(self, value: PackedSequence) -> Iterator[tuple[str, int]]:
        yield self.path, int(value.batch_sizes[0])

    def matches(self, value: Any) -> bool:
        return isinstance(value, PackedSequence)

    def split(self, value: PackedSequence, sizes: Sequence[int]) -> Sequence[Any]:
        sequences = unpack_sequence(value)
        keep_sorted = value.sorted_indices is None
        return [
            pack_sequence(sequences[start : start + size], enforce_sorted=keep_sorted) for start, size in _spans(sizes)
        ]

    def resize(self, value: PackedSequence, samples: int) -> Any:
        sequences = [sequence.detach() for sequence in unpack_sequence(value)]
        keep_sorted = value.sorted_indices is None and samples <= len(sequences)
        return pack_sequence(_cycled(sequences, samples), enforce_sorted=keep_sorted)


@dataclass(frozen=True)
class Samples:
    """A list or tuple whose items are the samples."""

    path: str

    def splits(self) -> Iterator[tuple[str, Split]]:
        yield self.path, "list"

    def counts(self, value: Any) -> Iterator[tuple[str, int]]:
        yield self.path, len(value)

    def matches(self, value: Any) -> bool:
        return type(value) in (list, tuple)

    def split(self, value: Any, sizes: Sequence[int]) -> Sequence[Any]:
        return [value[start : start + size] for start, size in _spans(sizes)]

    def resize(self, value: Any, samples: int) -> Any:
        repeated = [map_leaves(_own_memory, item) for item in _cycled(list(value), samples)]
        return type(value)(repeated)


def _spans(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Start and size of each part."""
    return zip(accumulate(sizes, initial=0), sizes, strict=False)


def _cycled(items: list[Any], count: int) -> list[Any]:
    return (items * -(-count // len(items)))[:count]


def _own_memory(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return leaf


@dataclass(frozen=True)
class Whole:
    """A part that every micro-batch is given as it is; `chosen` when batch_dims says so."""

    path: str
    chosen: bool = False

    def splits(self) -> Iterator[tuple[str, Split]]:
        yield self.path, None

    def counts(self, value: Any) -> Iterator[tuple[str, int]]:
        return iter(())

    def matches(self, value: Any) -> bool:
        return self.chosen or not any(has_dims(leaf) for _, leaf in leaves(value))

    def split(self, value: Any, sizes: Sequence[int]) -> Sequence[Any]:
        return [value] * len(sizes)

    def resize(self, value: Any, samples: int) -> Any:
        return value


@dataclass(frozen=True)
class Container:
    """A container with a node for each of its parts."""

    kind: type
    names: tuple[str, ...]
    nodes: tuple[Node, ...]

    def splits(self) -> Iterator[tuple[str, Split]]:
        for node in self.nodes:
            yield from node.splits()

    def counts(self, value: Any) -> Iterator[tuple[str, int]]:
        for node, (_, part) in zip(self.nodes, entries(value) or (), strict=True):
            yield from node.counts(part)

    def matches(self, value: Any) -> bool:
        if type(value) is not self.kind:
            return False
        parts = entries(value) or []
        return tuple(name for name, _ in parts) == self.names and all(
            node.matches(part) for node, (_, part) in zip(self.nodes, parts, strict=True)
        )

    def split(self, value: Any, sizes: Sequence[int]) -> Sequence[Any]:
        columns = [node.split(part, sizes) for node, (_, part) in zip(self.nodes, entries(value) or (), strict=True)]
        return [rebuild(value, row) for row in zip(*columns, strict=True)] if columns else [value] * len(sizes)

    def resize(self, value: Any, samples: int) -> Any:
        parts = zip(self.nodes, entries(value) or (), strict=True)
        return rebuild(value, [node.resize(part, samples) for node, (_, part) in parts])
