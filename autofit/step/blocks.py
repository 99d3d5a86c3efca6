"""Which parts of a model can be recomputed in backward: found by name, by what libraries declare, or by structure."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle

from autofit.batch.nest import leaves
from autofit.step.chains import find_runs
from autofit.step.naming import Target, resolve
from autofit.step.structure import Structure, can_be_patched, unwrapped

# Blocks that hold fewer of the model's weights than this leave most of its activations alone: look further.
_ENOUGH = 0.5


@dataclass(frozen=True)
class Blocks:
    """The parts of a model that can be recomputed, none inside another.

    `names` are submodules as in `named_modules`, or runs of layers of an `nn.Sequential` (`features[0:5]`), in the
    order of their calls where that was observed, else of their registration. `found_by` says how, in one phrase.
    `left_out` are (name, reason). `selective` are those that were seen to be fit for mode `selective` too.
    """

    names: tuple[str, ...]
    found_by: str
    left_out: tuple[tuple[str, str], ...] = ()
    selective: tuple[str, ...] = ()


def discover_blocks(model: nn.Module, *, patterns: Sequence[str] | None = None) -> Blocks:
    """The blocks of a model, from its structure alone; there may be none.

    `patterns` are names of submodules, `fnmatch` patterns of names, class names, or slices of an `nn.Sequential`.
    Without them: the layers that transformers marks, else heavy modules of a class that occurs more than once, else
    runs of layers, else the largest parts. Names are those inside DistributedDataParallel or torch.compile.
    Raises ConfigError when a pattern matches nothing.
    """
    model = unwrapped(model)
    if patterns:
        return Blocks(tuple(t.name for t in resolve(model, patterns)), f"named: {', '.join(patterns)}")
    structure = Structure(model)
    return _marked_blocks(structure) or _structural_blocks(structure) or _thorough_blocks(model)


def _marked_blocks(structure: Structure) -> Blocks | None:
    marked = _marked_classes(structure.model)
    found: list[tuple[str, nn.Module]] = []
    inside: str | None = None
    for name, module in structure.model.named_modules():
        if not name or type(module) not in marked or (inside and name.startswith(inside)):
            continue
        inside = f"{name}."
        if structure.is_stage(module):
            found += structure.repeated_modules(module, prefix=inside)
        elif can_be_patched(module):
            found.append((name, module))
    if not any(structure.is_worthwhile(module) for _, module in found):
        return None  # nothing is marked, or only single convolutions, as in transformers' ResNet
    return Blocks(tuple(name for name, _ in found), f"layers that transformers marks ({_kinds(found)})")


def _marked_classes(model: nn.Module) -> set[type[nn.Module]]:
    """Classes of the layers that transformers would checkpoint, recognised without importing it."""
    kinds = {type(module) for module in model.modules()}
    marked = {kind for kind in kinds if any(base.__name__ == "GradientCheckpointingLayer" for base in kind.__mro__)}
    if marked:
        return marked
    unsplit: set[str] = set()
    for module in model.modules():
        declared = getattr(module, "_no_split_modules", None)
        unsplit.update(declared if isinstance(declared, (list, tuple, set)) else ())
    return {kind for kind in kinds if kind.__name__ in unsplit}


def _structural_blocks(structure: Structure) -> Blocks | None:
    modules = list(structure.repeated_modules(structure.model))
    names = [name for name, _ in modules]
    found_by = [f"repeated modules ({_kinds(modules)})"] if modules else []
    if sum(structure.weights(m) for _, m in modules) < _ENOUGH * structure.weights(structure.model):
        runs = find_runs(structure, outside=names)
        if runs:
            names += runs
            found_by.append(f"runs of layers of nn.Sequential ({len(runs)})")
    if not names:
        parts = list(structure.largest_parts())
        names = [name for name, _ in parts]
        found_by = [f"largest parts ({_kinds(parts)})"] if parts else []
    return Blocks(tuple(names), "; ".join(found_by)) if names else None


def _thorough_blocks(model: nn.Module) -> Blocks:
    structure = Structure(model, thorough=True)
    found = _structural_blocks(structure)
    if found:
        return found
    single = (name for name, module in model.named_children() if structure.weights(module))
    return Blocks(
        (),
        "no part of the model frees anything between its layers",
        tuple((name, "recomputing it alone frees nothing") for name in single),
    )


def _kinds(modules: Iterable[tuple[str, nn.Module]]) -> str:
    counts = Counter(type(module).__name__ for _, module in modules)
    return ", ".join(f"{count} × {name}" for name, count in counts.items())


@dataclass
class Observed:
    """What blocks did during one forward."""

    order: list[str] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    unfit: dict[str, str] = field(default_factory=dict)
    _random: object = None
    _inputs: list[tuple[str, torch.Tensor, int]] = field(default_factory=list)

    def entered(self, name: str, arguments: Any, *, watch: bool) -> None:
        """A block is called. With `watch`, its inputs are kept, without their graph, to see whether they change."""
        if not self.calls[name]:
            self.order.append(name)
        self.calls[name] += 1
        tensors = _tensors(arguments)
        if not tensors:
            self.unfit[name] = "takes no tensor"
        self._random = _host_random_state()
        if watch:
            self._inputs += [(name, t.detach(), t._version) for t in tensors if not t.is_inference()]

    def left(self, name: str, output: Any) -> None:
        """A block returned."""
        if not any(t.is_floating_point() or t.is_complex() for t in _tensors(output)):
            self.unfit[name] = "returns no floating-point tensor"
        if self._random != _host_random_state():
            self.unfit[name] = "draws from Python's or NumPy's random numbers, which a recomputation cannot repeat"

    def finish(self) -> None:
        """The forward is over: draw the conclusions and let the inputs go."""
        self.unfit |= {
            name: "its input is changed in place" for name, t, version in self._inputs if t._version != version
        }
        self._inputs.clear()

    def objection(self, name: str) -> str | None:
        """Why the block cannot be recomputed, None if it can."""
        calls = self.calls[name]
        if calls != 1:
            return f"called {calls} times in one forward" if calls else "not called in the forward"
        return self.unfit.get(name)


@contextmanager
def observe_calls(model: nn.Module, names: Iterable[str]) -> Iterator[Observed]:
    """Watches the blocks `names` during one forward that is run inside.

    A small batch will do, fake tensors too. The inputs of all blocks stay alive until the model's forward returns, as
    they do where all blocks are recomputed.
    """
    model = unwrapped(model)
    observed = Observed()
    handles = [model.register_forward_hook(lambda *_: observed.finish())]
    for target in resolve(model, tuple(names)):
        handles += _watch(target, observed)
    try:
        yield observed
    finally:
        for handle in handles:
            handle.remove()
        observed.finish()


def _watch(target: Target, observed: Observed) -> list[RemovableHandle]:
    # What a Sequential is given reaches its first run only.
    watch = target.slice is None or target.slice.start == 0

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        observed.entered(target.name, (args, kwargs), watch=watch)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        observed.left(target.name, output)

    return [
        target.module.register_forward_pre_hook(before, with_kwargs=True),
        target.module.register_forward_hook(after),
    ]


def keep_checkpointable(blocks: Blocks, observed: Observed) -> Blocks:
    """The blocks that one forward showed to be fit for recomputation, in the order of their calls; why others are not.

    Fit is a block that is called exactly once, takes and returns tensors, draws random numbers from torch only, and
    whose input nobody changes in place.
    """
    objections = {name: observed.objection(name) for name in blocks.names}
    kept = sorted((name for name, reason in objections.items() if reason is None), key=observed.order.index)
    left_out = tuple((name, reason) for name, reason in objections.items() if reason is not None)
    return replace(blocks, names=tuple(kept), left_out=blocks.left_out + left_out)


def _tensors(nest: Any) -> list[torch.Tensor]:
    parts = [leaf.data if isinstance(leaf, PackedSequence) else leaf for _, leaf in leaves(nest)]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _host_random_state() -> object:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate()
    _, keys, *position = numpy.random.get_state()
    return random.getstate(), keys.tobytes(), position
