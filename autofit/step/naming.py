"""From the names of blocks to what they mean in a model, and the errors when they mean nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from autofit.errors import ConfigError
from autofit.step.chains import Slice
from autofit.step.structure import can_be_patched, is_plain_sequential


@dataclass(frozen=True)
class Target:
    """A block in a model: a module, or with `slice` some of the children of a Sequential."""

    name: str
    module: nn.Module
    slice: Slice | None = None

    @property
    def layers(self) -> list[nn.Module]:
        """The children of the Sequential, with repeated ones as often as they run."""
        return [layer for layer in self.module._modules.values() if layer is not None]

    @property
    def modules(self) -> list[nn.Module]:
        """What runs in the block, outermost level."""
        return self.layers[self.slice.start : self.slice.stop] if self.slice else [self.module]


def resolve(model: nn.Module, patterns: Sequence[str]) -> list[Target]:
    """The blocks that names, `fnmatch` patterns of names, class names and slices stand for, in order of registration.

    Of nested ones, the outermost. Raises ConfigError when a pattern matches nothing, when what it matches cannot be
    recomputed, or when two slices overlap.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    position = {name: i for i, name in enumerate(modules)}
    found: dict[str, Target] = {}
    for pattern in patterns:
        slice_ = Slice.parse(pattern)
        for target in [_sliced(modules, slice_)] if slice_ else _matching(modules, pattern):
            found[target.name] = target

    def place(target: Target) -> tuple[int, int]:
        return (position[target.slice.parent], target.slice.start) if target.slice else (position[target.name], -1)

    return list(_outermost(sorted(found.values(), key=place)))


def _outermost(targets: list[Target]) -> Iterator[Target]:
    inside: set[nn.Module] = set()
    previous: Target | None = None
    for target in targets:
        if previous and previous.slice and target.slice and previous.module is target.module:
            if target.slice.start < previous.slice.stop:
                raise ConfigError(
                    f"The blocks '{previous.name}' and '{target.name}' overlap: let runs of layers not share any."
                )
        elif inside.issuperset(target.modules):
            continue
        inside.update(m for top in target.modules for m in top.modules())
        previous = target
        yield target


def _matching(modules: dict[str, nn.Module], pattern: str) -> list[Target]:
    if pattern and pattern in modules:
        names = [pattern]
    else:
        names = [
            name
            for name, module in modules.items()
            if name and (fnmatchcase(name, pattern) or fnmatchcase(type(module).__name__, pattern))
        ]
    if not names:
        raise ConfigError(_no_match(modules, pattern))
    usable = [name for name in names if can_be_patched(modules[name])]
    if not usable:
        kind = type(modules[names[0]]).__name__
        raise ConfigError(
            f"The block {pattern!r} is a {kind}, which has no forward to recompute. "
            f"Name the modules inside it, such as '{names[0]}.*'."
        )
    return [Target(name, modules[name]) for name in usable]


def _sliced(modules: dict[str, nn.Module], slice_: Slice) -> Target:
    module = modules.get(slice_.parent)
    if module is None:
        raise ConfigError(_no_match(modules, slice_.parent))
    if not is_plain_sequential(module):
        raise ConfigError(
            f"The block '{slice_}' is a run of layers of {slice_.parent!r}, which is a {type(module).__name__}. "
            "Only an nn.Sequential with its own forward can be cut: name whole modules instead."
        )
    layers = len(module._modules)
    if not 0 <= slice_.start < slice_.stop <= layers:
        raise ConfigError(f"The block '{slice_}' is empty or outside of its nn.Sequential, which has {layers} layers.")
    return Target(str(slice_), module, slice_)


def _no_match(modules: dict[str, nn.Module], pattern: str) -> str:
    known = [*filter(None, modules), *{type(module).__name__: None for module in modules.values()}]
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.5)
    hint = f" Near: {', '.join(repr(name) for name in near)}." if near else ""
    return (
        f"No module of the model is called {pattern!r}.{hint} Allowed: a name as in model.named_modules(), a pattern "
        "such as 'layers.*', a class name, or a run of layers of an nn.Sequential such as 'features[0:5]'."
    )
