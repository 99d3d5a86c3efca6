"""Activation checkpointing that can be undone: blocks forget their activations and recompute them in backward.

A block's `forward` is replaced by an instance attribute, so types, names, `state_dict` and hooks on the block stay what
they are. Hooks on modules inside a block run again when the block is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

from torch import nn

from autofit.candidate import Checkpointing, CheckpointingMode
from autofit.errors import ConfigError
from autofit.step.blocks import discover_blocks
from autofit.step.chains import Slice
from autofit.step.naming import Target, resolve
from autofit.step.offload import offloaded
from autofit.step.recompute import Forward, recomputed
from autofit.step.structure import unwrapped

_Patch = tuple[nn.Module, Callable[[], Forward]]


@dataclass(frozen=True)
class Spans:
    """Blocks to be watched while a step runs: `around` wraps the forward of each, recomputed or not.

    As where a block is recomputed, models of transformers fill no cache.
    """

    names: tuple[str, ...]
    around: Callable[[str, Forward], Forward]


class CheckpointPlan:
    """Checkpointing prepared for one model, to be switched on for every step.

    Raises ConfigError when a block is not in the model, or when the model has none.
    """

    def __init__(self, model: nn.Module, checkpointing: Checkpointing, *, spans: Spans | None = None) -> None:
        self._patches: list[_Patch] = []
        self._configs: list[Any] = []
        self._undo: list[Callable[[], object]] = []
        model = unwrapped(model)
        modes = _modes(model, checkpointing)
        blocks = [_Block(target, modes.get(target.name, "none"), spans) for target in _targets(model, modes, spans)]
        self._patches = _patches(blocks)
        if modes or spans:
            self._configs = _configs_with_cache(model)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Checkpointing is in force inside, and undone on exit, after an exception too."""
        before = len(self._undo)
        try:
            for module, patched in self._patches:
                self._undo.append(_putting_back(module.__dict__, "forward"))
                module.__dict__["forward"] = patched()
            for config in self._configs:
                self._undo.append(partial(setattr, config, "use_cache", config.use_cache))
                config.use_cache = False
            yield
        finally:
            self.undo(before)

    def undo(self, down_to: int = 0) -> None:
        """Undoes what is in force; again where an interrupt came between, for what is undone is forgotten last."""
        while len(self._undo) > down_to:
            self._undo[-1]()
            self._undo.pop()


def _putting_back(attributes: dict[str, Any], name: str) -> Callable[[], object]:
    """What makes an attribute again what it is now, or absent."""
    if name in attributes:
        return partial(attributes.__setitem__, name, attributes[name])
    return partial(attributes.pop, name, None)


@contextmanager
def checkpointed(model: nn.Module, checkpointing: Checkpointing) -> Iterator[None]:
    """Applies checkpointing to the model inside, once; for every step of a training, keep a `CheckpointPlan`."""
    with CheckpointPlan(model, checkpointing).active():
        yield


def _modes(model: nn.Module, checkpointing: Checkpointing) -> dict[str, CheckpointingMode]:
    """The mode of each block by its own name, in order of registration; of nested blocks, the outermost."""
    if checkpointing.mode == "none":
        return {}
    asked = checkpointing.modes or dict.fromkeys(_discovered(model, checkpointing.mode), checkpointing.mode)
    if not asked:
        raise ConfigError(
            f"checkpointing '{checkpointing.mode}' needs blocks, and {type(model).__name__} has no part "
            "that holds several layers. Name submodules, Checkpointing(mode='full', blocks=(…)), or use mode 'none'."
        )
    found: dict[str, CheckpointingMode] = {}
    for pattern, mode in asked.items():
        for target in resolve(model, (pattern,)):
            if mode == "selective" and _is_recurrent(target):
                raise ConfigError(
                    f"The block {target.name!r} has recurrent layers, which write over the products that mode "
                    "'selective' would keep. Recompute it in mode 'full'."
                )
            found.setdefault(target.name, mode)
    return {target.name: found[target.name] for target in resolve(model, tuple(asked))}


def _discovered(model: nn.Module, mode: CheckpointingMode) -> Sequence[str]:
    names = discover_blocks(model).names
    if mode != "selective" or not names:
        return names
    return [target.name for target in resolve(model, names) if not _is_recurrent(target)]


def _is_recurrent(target: Target) -> bool:
    kinds = (nn.RNNBase, nn.RNNCellBase)
    return any(isinstance(module, kinds) for top in target.modules for module in top.modules())


def _targets(model: nn.Module, modes: Mapping[str, CheckpointingMode], spans: Spans | None) -> list[Target]:
    names = (*modes, *(name for name in (spans.names if spans else ()) if name not in modes))
    return resolve(model, names) if names else []


@dataclass(frozen=True)
class _Block:
    target: Target
    mode: CheckpointingMode
    spans: Spans | None

    @cached_property
    def modules(self) -> tuple[nn.Module, ...]:
        """All that run in it, of every level."""
        return tuple(dict.fromkeys(module for top in self.target.modules for module in top.modules()))

    def around(self, forward: Forward) -> Forward:
        """`forward` as it runs in this block."""
        if self.mode == "offload":
            forward = offloaded(forward, modules=self.modules)
        elif self.mode != "none":
            forward = recomputed(forward, modules=self.modules, selective=self.mode == "selective")
        if self.spans is not None and self.target.name in self.spans.names:
            forward = self.spans.around(self.target.name, forward)
        return forward


def _patches(blocks: Sequence[_Block]) -> list[_Patch]:
    cut: dict[nn.Module, list[_Block]] = {}
    patches: list[_Patch] = []
    for block in blocks:
        target = block.target
        if target.slice is None:
            patches.append((target.module, partial(_whole, block)))
            continue
        if target.module not in cut:
            cut[target.module] = []
            patches.append((target.module, partial(_cut, cut[target.module])))
        cut[target.module].append(block)
    return patches


def _whole(block: _Block) -> Forward:
    return block.around(block.target.module.forward)


def _cut(runs: Sequence[_Block]) -> Forward:
    """The forward of a Sequential of which the `runs`, in order, are recomputed."""
    layers = runs[0].target.layers
    steps: list[Forward] = []
    position = 0
    for block in runs:
        run = cast(Slice, block.target.slice)
        steps += layers[position : run.start]
        steps.append(block.around(partial(_in_turn, layers[run.start : run.stop])))
        position = run.stop
    return partial(_in_turn, [*steps, *layers[position:]])


def _in_turn(steps: Sequence[Forward], input: Any) -> Any:
    for step in steps:
        input = step(input)
    return input


def fills_cache(model: nn.Module) -> bool:
    """Whether the model, one of transformers, keeps keys and values for later while it is trained."""
    return any(config.use_cache for config in _configs_with_cache(unwrapped(model)))


def _configs_with_cache(model: nn.Module) -> list[Any]:
    """transformers' configurations that can ask for a cache of keys and values: recomputing a layer fills it twice."""
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    return [config for config in configs.values() if _is_transformers(config) and hasattr(config, "use_cache")]


def _is_transformers(config: Any) -> bool:
    return any(base.__name__.lower() == "pretrainedconfig" for base in type(config).__mro__)
