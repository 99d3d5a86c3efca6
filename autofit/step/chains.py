"""Runs of layers of an `nn.Sequential` as blocks: `features[0:5]`, or `[0:5]` where the model itself is the Sequential.

A plain stack of layers has no module that stands for several of them. Recomputing one layer saves nothing, for its
input is kept anyway; recomputing a run of layers saves all that lies between.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import nn

from autofit.candidate import balanced
from autofit.step.structure import Structure, frees_activations, is_plain_sequential

_SLICE = re.compile(r"^(?P<parent>[^\[\]]*)\[(?P<start>\d+):(?P<stop>\d+)\]$")


@dataclass(frozen=True)
class Slice:
    """The children `start` to `stop` (not included) of the Sequential named `parent`."""

    parent: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.parent}[{self.start}:{self.stop}]"

    @classmethod
    def parse(cls, name: str) -> Slice | None:
        """The slice that `str` wrote, None for any other name."""
        match = _SLICE.match(name)
        return cls(match["parent"], int(match["start"]), int(match["stop"])) if match else None


def find_runs(structure: Structure, *, outside: Collection[str]) -> list[str]:
    """Names of runs of layers worth recomputing, in those Sequentials of the model that lie in no module of `outside`.

    A run ends after each pooling, where the tensor that must be kept is smallest, and is at most about √n weights long:
    with n layers, √n runs of √n layers keep the fewest tensors (Chen et al. 2016, arXiv:1604.06174). A Sequential that
    is one run goes by its own name.
    """
    chains = list(_chains(structure, structure.model, "", outside))
    total = sum(len(_unit_starts(structure, chain)) for _, chain in chains)
    longest = max(2, math.ceil(math.sqrt(total)))
    slices = [
        Slice(name, start, stop)
        for name, chain in chains
        for start, stop in _runs(structure, chain, longest)
        if frees_activations(chain[start:stop])
    ]
    lengths = {name: len(chain) for name, chain in chains}
    if len(slices) == 1 and slices[0].stop - slices[0].start == sum(lengths.values()):
        return []  # recomputing everything at once needs all of the memory again
    return [s.parent if (s.start, s.stop) == (0, lengths[s.parent]) else str(s) for s in slices]


def _chains(
    structure: Structure, module: nn.Module, name: str, outside: Collection[str]
) -> Iterator[tuple[str, list[nn.Module]]]:
    """The outermost Sequentials whose children hold one weight at most."""
    if name in outside or not structure.is_worthwhile(module):
        return
    children = list(module.children())
    if is_plain_sequential(module) and not any(structure.is_worthwhile(child) for child in children):
        yield name, list(module._modules.values())  # type: ignore[arg-type]  # children() would skip a repeated one
        return
    for child_name, child in module.named_children():
        yield from _chains(structure, child, f"{name}.{child_name}" if name else child_name, outside)


def _unit_starts(structure: Structure, chain: list[nn.Module]) -> list[int]:
    """Where a run may begin: at a layer with a weight, the first also before it, that does not write over its input."""
    usable = [i for i, layer in enumerate(chain) if not _writes_input(layer)]
    weighted = [i for i in usable if structure.weights(chain[i])]
    return [usable[0], *weighted[1:]] if weighted else []


def _writes_input(layer: nn.Module) -> bool:
    while children := list(layer.children()):
        layer = children[0]
    return bool(getattr(layer, "inplace", False))


def _runs(structure: Structure, chain: list[nn.Module], longest: int) -> Iterator[tuple[int, int]]:
    """The chain cut after its poolings, and each part into runs of at most `longest` units, as evenly as possible."""
    starts = _unit_starts(structure, chain)
    if not starts:
        return
    parts: list[list[int]] = [[]]
    for start, stop in zip(starts, [*starts[1:], len(chain)], strict=True):
        parts[-1].append(start)
        if stop < len(chain) and any("Pool" in type(layer).__name__ for layer in chain[start:stop]):
            parts.append([])
    ends = [*(part[0] for part in parts[1:]), len(chain)]
    for part, end in zip(parts, ends, strict=True):
        sizes = balanced(len(part), -(-len(part) // longest))
        cuts = [part[sum(sizes[:i])] for i in range(len(sizes))]
        yield from zip(cuts, [*cuts[1:], end], strict=True)
