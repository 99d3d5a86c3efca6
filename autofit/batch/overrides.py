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
    """What is settled, by path of the leaf, or of the list or container; dims are counted from 0. Empty if nothing is.

    A container's path stands for all tensors in it, and a dim alone for all of the batch's; a longer path wins over a
    shorter one. Raises ConfigError for values that are not allowed, paths that are not in the batch, and dims that a
    tensor does not have.
    """
    if batch_dims is None:
        return {}
    given: Mapping[str, Any] = batch_dims if isinstance(batch_dims, Mapping) else {"": batch_dims}
    parts = dict(_parts(batch, ""))
    _check_paths(batch, [path for path in given if path not in parts])
    chosen: dict[str, Split] = {}
    for path in given:
        longer = [other for other in given if other != path and covering(other, [path]) is not None]
        chosen |= _settled(parts[path], path, _checked(given[path], path), longer)
    return chosen


def _check_paths(batch: Any, unknown: list[str]) -> None:
    if unknown:
        known = [path for path, leaf in leaves(batch) if has_dims(leaf)]
        more = f" and {len(known) - _PATHS_SHOWN} more" if len(known) > _PATHS_SHOWN else ""
        raise ConfigError(
            f"batch_dims names {', '.join(map(repr, unknown))}, which the batch does not have. "
            f"Its tensors: {', '.join(map(repr, known[:_PATHS_SHOWN]))}{more}."
        )


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


def _settled(value: Any, path: str, split: Split, longer: Collection[str]) -> dict[str, Split]:
    if split == "list":
        if type(value) not in (list, tuple):
            raise ConfigError(f"batch_dims says 'list' for {shown_path(path)}, which is a {type(value).__name__}.")
        return {path: "list"}
    if split is None and not longer:
        return {path: None}
    targets = [(where, leaf) for where, leaf in leaves(value, path) if has_dims(leaf)]
    if not targets:
        raise ConfigError(f"batch_dims says dim {split} for {shown_path(path)}, which holds no tensor with dims.")
    return {where: _from_zero(leaf, where, split) for where, leaf in targets if covering(where, longer) is None}


def _from_zero(leaf: Any, path: str, split: int | None) -> Split:
    if split is None:
        return None
    if isinstance(leaf, PackedSequence):
        return "list"  # whatever the dim: a packed sequence has its own
    assert isinstance(leaf, torch.Tensor)
    if not -leaf.ndim <= split < leaf.ndim:
        raise ConfigError(
            f"batch_dims says dim {split} for {shown_path(path)}, which has {leaf.ndim}: {tuple(leaf.shape)}. "
            f"Pass a dict to give it another dim or None. {_ALLOWED}."
        )
    return split % leaf.ndim
