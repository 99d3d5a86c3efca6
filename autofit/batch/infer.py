"""Find where the samples of a batch lie. What is ambiguous is refused, never guessed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch.nn.utils.rnn import PackedSequence

from autofit.batch.layout import BatchLayout
from autofit.batch.nest import entries, has_dims, holds_tensor, join
from autofit.batch.nodes import Along, Container, Node, Packed, Samples, Split, Whole
from autofit.batch.overrides import read_batch_dims
from autofit.batch.readings import Reading, collect, decide, shapes
from autofit.errors import ConfigError


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
    evidence = collect(batch, chosen)
    reading = decide(batch, evidence)
    if reading.samples == 0:
        raise ConfigError(f"The batch has no samples: {shapes(evidence.tensors) or 'batch_dims names an empty one'}.")
    return BatchLayout(samples=reading.samples, root=_node(batch, "", chosen, reading))


def _node(value: Any, path: str, chosen: Mapping[str, Split], reading: Reading) -> Node:
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
