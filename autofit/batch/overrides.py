"""What `batch_dims` says, checked against the batch that it is meant for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from autofit.batch.nest import entries, has_dims, join, leaves, shown_path
from autofit.batch.nodes import Split
from autofit.errors import ConfigError

_ALLOWED = (
    "Allowed: a dim for all tensors, 'list' for a batch that is a list of samples, or a dict from paths to a dim, to "
    "None (pass whole) or to 'list' (its items are the samples)"
)
_PATHS_SHOWN = 20


def read_batch_dims(batch: Any, batch_dims: Any) -> dict[str, Split]:
    """What is settled, by path of the leaf or list; dims are counted from 0. Empty when nothing is.

    A container's path stands for all tensors in it; a longer path wins over a shorter one. Raises ConfigError for
    values that are not allowed, paths that are not in the batch, and dims that a tensor does not have.
    """
    if batch_dims is None:
        return {}
    if not isinstance(batch_dims, Mapping):
        batch_dims = (
            {"": _checked(batch_dims, "")}
            if batch_dims == "list"
            else dict.fromkeys((path for path, leaf in leaves(batch) if has_dims(leaf)), _checked(batch_dims, ""))
        )
    parts = dict(_parts(batch, ""))
    unknown = [path for path in batch_dims if path not in parts]
    if unknown:
        known = [path for path, leaf in leaves(batch) if has_dims(leaf)]
        more = f" and {len(known) - _PATHS_SHOWN} more" if len(known) > _PATHS_SHOWN else ""
        raise ConfigError(
            f"batch_dims names {', '.join(map(repr, unknown))}, which the batch does not have. "
            f"Its tensors: {', '.join(map(repr, known[:_PATHS_SHOWN]))}{more}."
        )
    chosen: dict[str, Split] = {}
    for path in sorted(batch_dims, key=len):
        chosen |= _expanded(parts[path], path, _checked(batch_dims[path], path))
    lists = {path for path, split in chosen.items() if split == "list"}
    return {path: split for path, split in chosen.items() if covering(path, lists - {path}) is None}


def covering(path: str, others: Collection[str]) -> str | None:
    """The one of `others` that is `path` or contains it; None if there is none."""
    if path in others:
        return path
    return next((other for other in others if not other or path.startswith(f"{other}.")), None)


def _parts(node: Any, path: str) -> list[tuple[str, Any]]:
    """Every container and leaf with its path."""
    found = [(path, node)]
    for name, part in entries(node) or []:
        found += _parts(part, join(path, name))
    return found


def _checked(split: Any, path: str) -> Split:
    if split is None or split == "list" or (isinstance(split, int) and not isinstance(split, bool)):
        return split  # type: ignore[no-any-return]
    where = f" for {path!r}" if path else ""
    raise ConfigError(f"batch_dims got {split!r}{where}. {_ALLOWED}.")


def _expanded(value: Any, path: str, split: Split) -> dict[str, Split]:
    if split == "list":
        if type(value) not in (list, tuple):
            raise ConfigError(f"batch_dims says 'list' for {shown_path(path)}, which is a {type(value).__name__}.")
        return {path: "list"}
    if entries(value) is None and split is None:
        return {path: None}
    targets = [(where, leaf) for where, leaf in leaves(value, path) if has_dims(leaf)]
    if not targets and split is not None:
        raise ConfigError(f"batch_dims says dim {split} for {shown_path(path)}, which holds no tensor with dims.")
    return {where: _positive(leaf, where, split) for where, leaf in targets}


def _positive(leaf: Any, path: str, split: Split) -> Split:
    if split is None:
        return None
    if isinstance(leaf, PackedSequence):
        return "list"  # whatever the dim: a packed sequence has its own
    assert isinstance(leaf, torch.Tensor)
    assert isinstance(split, int)
    if not -leaf.ndim <= split < leaf.ndim:
        raise ConfigError(
            f"batch_dims says dim {split} for {shown_path(path)}, which has {leaf.ndim}: {tuple(leaf.shape)}. "
            f"Pass a dict to give it another dim or None: {_ALLOWED}."
        )
    return split % leaf.ndim
