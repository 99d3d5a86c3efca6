"""Any nest of tensors: what is inside, under which path, and the same nest with other things inside.

Containers are tuples, namedtuples, lists, Mappings (dict, `OrderedDict`, transformers' `BatchEncoding` and
`ModelOutput`) and dataclasses, frozen ones too. Everything else is a leaf; so is a `PackedSequence`, whose parts mean
nothing alone.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from autofit.errors import ConfigError

# Tuples by type, but one value by meaning.
_LEAF_TUPLES = (torch.Size, PackedSequence)


def entries(node: Any) -> list[tuple[str, Any]] | None:
    """The named parts of a container in order; None for a leaf."""
    if isinstance(node, torch.Tensor):
        return None
    if isinstance(node, Mapping):
        return [(str(key), node[key]) for key in node]
    if isinstance(node, tuple):
        if isinstance(node, _LEAF_TUPLES):
            return None
        names = getattr(node, "_fields", None) or map(str, range(len(node)))
        return list(zip(names, node, strict=True))
    if isinstance(node, list):
        return [(str(index), item) for index, item in enumerate(node)]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    return None


def rebuild(node: Any, values: Sequence[Any]) -> Any:
    """The container `node` with other parts, in the order of `entries`.

    Its type stays, and so does what a Mapping or dataclass carries beside its parts. Raises ConfigError for a type that
    can neither be copied and filled nor be made from its parts.
    """
    if type(node) is dict:
        return dict(zip(node, values, strict=True))
    if isinstance(node, tuple):
        if type(node) is tuple:
            return tuple(values)
        return type(node)._make(values) if hasattr(node, "_make") else type(node)(values)
    if type(node) is list:
        return list(values)
    if isinstance(node, Mapping):
        return _rebuild_mapping(node, values)
    twin = copy.copy(node)
    if isinstance(node, list):
        twin[:] = values
        return twin
    for field, value in zip(dataclasses.fields(node), values, strict=True):
        object.__setattr__(twin, field.name, value)  # frozen ones refuse the plain assignment
    return twin


def _rebuild_mapping(node: Mapping[Any, Any], values: Sequence[Any]) -> Mapping[Any, Any]:
    try:
        twin: Any = copy.copy(node)
        for key, value in zip(node, values, strict=True):
            twin[key] = value
    except TypeError:  # read-only: no item assignment, or not even a copy
        try:
            twin = type(node)(dict(zip(node, values, strict=True)))  # type: ignore[call-arg]
        except TypeError as error:
            raise ConfigError(
                f"A batch holds a {type(node).__name__}, which can neither be filled nor be made from a dict: {error}. "
                "Convert it with dict(…) in the collate function."
            ) from error
    assert isinstance(twin, Mapping)
    return twin


def map_leaves(transform: Callable[[Any], Any], node: Any) -> Any:
    """The same nest with `transform(leaf)` for every leaf; `node` itself when no leaf changes."""
    parts = entries(node)
    if parts is None:
        return transform(node)
    values = [map_leaves(transform, value) for _, value in parts]
    if all(new is old for new, (_, old) in zip(values, parts, strict=True)):
        return node
    return rebuild(node, values)


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path, such as `1.labels`; the path of a batch that is one leaf is empty."""
    parts = entries(node)
    if parts is None:
        yield path, node
        return
    for name, value in parts:
        yield from leaves(value, join(path, name))


def join(path: str, name: str) -> str:
    """The path of the part `name` of what lies at `path`."""
    return f"{path}.{name}" if path else name


def shown_path(path: str) -> str:
    """A path as messages show it."""
    return path or "the batch itself"


def is_tensor(leaf: Any) -> bool:
    """Whether a leaf holds numbers that move to a device: a tensor or a packed sequence."""
    return isinstance(leaf, (torch.Tensor, PackedSequence))


def has_dims(leaf: Any) -> bool:
    """Whether a leaf can hold one entry per sample: a packed sequence, or a tensor of at least one dim."""
    return isinstance(leaf, PackedSequence) or (isinstance(leaf, torch.Tensor) and leaf.ndim > 0)


def holds_tensor(node: Any) -> bool:
    """Whether there is any tensor in the nest."""
    return any(is_tensor(leaf) for _, leaf in leaves(node))
