"""Activation checkpointing that can be undone: blocks forget their activations and recompute them in backward.

A block's `forward` is replaced by an instance attribute, so types, names, `state_dict` and hooks on the block stay what
they are. Hooks on modules inside a block run again when the block is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from autofit.candidate import Checkpointing
from autofit.errors import ConfigError
from autofit.step.blocks import discover_blocks
from autofit.step.chains import Slice
from autofit.step.naming import Target, resolve
from autofit.step.recompute import Forward, recomputed
from autofit.step.structure import unwrapped

_ABSENT = object()
_Run = tuple[Slice, tuple[nn.Module, ...]]
_Patch = tuple[nn.Module, Callable[[], Forward]]


class CheckpointPlan:
    """Checkpointing prepared for one model, to be switched on for every step.

    Raises ConfigError when a block is not in the model, or when the model has none.
    """

    def __init__(self, model: nn.Module, checkpointing: Checkpointing) -> None:
        self._patches: list[_Patch] = []
        self._configs: list[Any] = []
        if checkpointing.mode == "none":
            return
        model = unwrapped(model)
        names = checkpointing.blocks or discover_blocks(model).names
        if not names:
            raise ConfigError(
                f"checkpointing 'full' needs blocks to recompute, and {type(model).__name__} has no part that holds "
                "several layers. Name submodules, Checkpointing(mode='full', blocks=(…)), or use mode 'none'."
            )
        self._patches = _patches(resolve(model, names))
        self._configs = _configs_with_cache(model)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Checkpointing is in force inside, and undone on exit, after an exception too."""
        undo: list[tuple[dict[str, Any], Any]] = []
        caches = [(config, config.use_cache) for config in self._configs]
        try:
            for module, patched in self._patches:
                undo.append((module.__dict__, module.__dict__.get("forward", _ABSENT)))
                module.__dict__["forward"] = patched()
            for config, _ in caches:
                config.use_cache = False
            yield
        finally:
            for config, use_cache in caches:
                config.use_cache = use_cache
            for attributes, forward in reversed(undo):
                if forward is _ABSENT:
                    attributes.pop("forward", None)
                else:
                    attributes["forward"] = forward


@contextmanager
def checkpointed(model: nn.Module, checkpointing: Checkpointing) -> Iterator[None]:
    """Applies checkpointing to the model inside, once; for every step of a training, keep a `CheckpointPlan`."""
    with CheckpointPlan(model, checkpointing).active():
        yield


def _patches(targets: Sequence[Target]) -> list[_Patch]:
    runs: dict[nn.Module, list[_Run]] = {}
    patches: list[_Patch] = []
    for target in targets:
        modules = tuple(dict.fromkeys(module for top in target.modules for module in top.modules()))
        if target.slice is None:
            patches.append((target.module, partial(_whole, target.module, modules)))
            continue
        if target.module not in runs:
            runs[target.module] = []
            patches.append((target.module, partial(_cut, target.layers, runs[target.module])))
        runs[target.module].append((target.slice, modules))
    return patches


def _whole(module: nn.Module, modules: Sequence[nn.Module]) -> Forward:
    return recomputed(module.forward, modules=modules)


def _cut(layers: Sequence[nn.Module], runs: Sequence[_Run]) -> Forward:
    """The forward of a Sequential of which the `runs`, in order, are recomputed."""
    steps: list[Forward] = []
    position = 0
    for slice_, modules in runs:
        steps += layers[position : slice_.start]
        steps.append(recomputed(partial(_in_turn, layers[slice_.start : slice_.stop]), modules=modules))
        position = slice_.stop
    return partial(_in_turn, [*steps, *layers[position:]])


def _in_turn(steps: Sequence[Forward], input: Any) -> Any:
    for step in steps:
        input = step(input)
    return input


def _configs_with_cache(model: nn.Module) -> list[Any]:
    """transformers' configurations that can ask for a cache of keys and values: recomputing a layer fills it twice."""
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    return [config for config in configs.values() if _is_transformers(config) and hasattr(config, "use_cache")]


def _is_transformers(config: Any) -> bool:
    return any(base.__name__.lower() == "pretrainedconfig" for base in type(config).__mro__)
