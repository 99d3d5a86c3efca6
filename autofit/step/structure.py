"""What a module tree tells about itself without running: where the weights lie, what repeats, what is a mere stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

# What layers keep for backward. All others are taken to keep their input.
_KEEP_OUTPUT = (nn.ReLU, nn.Sigmoid, nn.Tanh, nn.Softmax, nn.LogSoftmax)
_KEEP_NEITHER = (nn.modules.dropout._DropoutNd,)
_RETURN_INPUT = (nn.Identity, nn.Flatten, nn.Unflatten)


class Structure:
    """The module tree of one model, weighed.

    A *weight* is a layer that multiplies: Linear, convolution, attention projection. Norms, biases and embeddings are
    none. A module is *worthwhile* as a block when it has two of them, or in a `thorough` search one next to layers that
    keep activations of their own.
    """

    def __init__(self, model: nn.Module, *, thorough: bool = False) -> None:
        self.model = model
        self._thorough = thorough
        self._weights: dict[nn.Module, int] = {}
        self._count_weights(model)
        inside = (module for module in model.modules() if module is not model)
        kinds = Counter(type(module) for module in inside if self.is_candidate(module))
        self.repeated = frozenset(kind for kind, count in kinds.items() if count >= 2)

    def _count_weights(self, module: nn.Module) -> int:
        if module not in self._weights:
            inside = sum(self._count_weights(child) for child in module.children())
            self._weights[module] = _own_weights(module) + inside
        return self._weights[module]

    def weights(self, module: nn.Module) -> int:
        """How many weights lie in the module, all levels."""
        return self._weights[module]

    def is_worthwhile(self, module: nn.Module) -> bool:
        """Whether recomputing the module frees activations inside it."""
        if is_leaf(module):
            return isinstance(module, nn.RNNBase)  # between its steps
        if self.weights(module) == 1 and self._thorough:
            return frees_activations([inner for inner in module.modules() if is_leaf(inner)])
        return self.weights(module) >= 2

    def is_candidate(self, module: nn.Module) -> bool:
        """Can be a block of its own: worthwhile, called as a module, and more than a plain list of others."""
        return type(module) not in CONTAINERS and can_be_patched(module) and self.is_worthwhile(module)

    def repeated_modules(self, parent: nn.Module, *, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
        """The outermost modules below `parent` of classes that occur more than once in the model; stages are opened.

        Next to two of them any other candidate counts as well, as the one `InceptionB` between its like does.
        """
        children = dict(parent.named_children())
        chosen = {name for name, child in children.items() if type(child) in self.repeated and not self.is_stage(child)}
        for name, child in children.items():
            inner = () if name in chosen else tuple(self.repeated_modules(child, prefix=f"{prefix}{name}."))
            if name in chosen or (len(chosen) >= 2 and not inner and self.is_candidate(child)):
                yield prefix + name, child
            else:
                yield from inner

    def is_stage(self, module: nn.Module) -> bool:
        """Little more than a list of modules of one repeated class, as `_DenseBlock` or timm's `ConvNeXtStage` are.

        So is one that holds another of its own class, as each level of a U-Net that is built from the inside out does.
        """
        if any(type(inner) is type(module) for inner in module.modules() if inner is not module):
            return True
        if self._only_repeats(module.children()):
            return True
        large = [child for child in module.children() if self.is_worthwhile(child)]
        lists = [child for child in large if isinstance(child, CONTAINERS) and self._only_repeats(child.children())]
        # What lies in a Sequential runs one after the other; a list beside something else may be experts of a mixture.
        sequences = sum(self.weights(child) for child in lists if is_plain_sequential(child))
        return bool(lists) and (len(lists) == len(large) or sequences > self.weights(module) / 2)

    def _only_repeats(self, modules: Iterable[nn.Module]) -> bool:
        modules = list(modules)
        if modules and all(type(module) in CONTAINERS for module in modules):
            return all(self._only_repeats(module.children()) for module in modules)
        return len({type(module) for module in modules}) == 1 and type(modules[0]) in self.repeated

    def largest_parts(self) -> Iterator[tuple[str, nn.Module]]:
        """The candidates among the parts of the model, at the first level that has more than one worthwhile part."""
        parent, prefix = self.model, ""
        while True:
            parts = [(name, child) for name, child in parent.named_children() if self.is_worthwhile(child)]
            if len(parts) != 1:
                break
            name, parent = parts[0]
            prefix += f"{name}."
        for name, child in parts:
            if self.is_candidate(child):
                yield prefix + name, child


def frees_activations(layers: Sequence[nn.Module]) -> bool:
    """Whether recomputing these layers in turn frees anything.

    The input of the first must be kept anyway, and the output of the last is the next block's input. So a Linear with a
    ReLU, which keeps its output, frees nothing, but a Linear with a GELU does.
    """
    layers = [layer for layer in layers if not isinstance(layer, _RETURN_INPUT)]
    return any(_keeps_input(layer) for layer in layers[1:]) or any(_keeps_output(layer) for layer in layers[:-1])


def _keeps_input(layer: nn.Module) -> bool:
    return not _keeps_output(layer) and not isinstance(layer, _KEEP_NEITHER)


def _keeps_output(layer: nn.Module) -> bool:
    return isinstance(layer, _KEEP_OUTPUT) or bool(getattr(layer, "inplace", False))


def is_leaf(module: nn.Module) -> bool:
    """One layer: made of no other modules (parametrizations do not count), nor of several weights by hand."""
    if isinstance(module, CONTAINERS) or any(name != "parametrizations" for name, _ in module.named_children()):
        return False
    return type(module).__module__.startswith("torch.nn.") or _own_weights(module) < 2


def _own_weights(module: nn.Module) -> int:
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return 0
    return sum(
        is_lazy(p) or sum(size > 1 for size in p.shape) >= 2 for p in module._parameters.values() if p is not None
    )


def can_be_patched(module: nn.Module) -> bool:
    """Has a forward of its own that an instance attribute can take the place of."""
    return not isinstance(module, torch.jit.ScriptModule) and type(module).forward is not nn.Module.forward


def is_plain_sequential(module: nn.Module) -> bool:
    """Runs its children one after the other and does nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's model inside DistributedDataParallel and torch.compile: block names start there."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model
