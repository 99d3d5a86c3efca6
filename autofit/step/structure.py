"""What a module tree tells about itself without running: where the weights lie, what repeats, what is a mere stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Structure:
    """The module tree of one model, weighed.

    A *weight* is a layer that multiplies: Linear, convolution, attention projection. Norms, biases and embeddings are
    none. A module is *heavy* when it is made of other modules with at least two weights: recomputing less than that
    saves next to nothing, since the input of a layer must be kept anyway.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._weights: dict[nn.Module, int] = {}
        self._count_weights(model)
        kinds = Counter(type(module) for module in model.modules() if self.is_candidate(module))
        self.repeated = frozenset(kind for kind, count in kinds.items() if count >= 2)

    def _count_weights(self, module: nn.Module) -> int:
        if module not in self._weights:
            own = 0
            if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                own = sum(is_lazy(p) or p.ndim >= 2 for p in module._parameters.values() if p is not None)
            self._weights[module] = own  # before the children: a tree with a loop must end too
            total = own + sum(self._count_weights(child) for child in module.children())
            self._weights[module] = min(total, 1) if is_leaf(module) else total
        return self._weights[module]

    def weights(self, module: nn.Module) -> int:
        """How many weights lie in the module, all levels."""
        return self._weights[module]

    def is_heavy(self, module: nn.Module) -> bool:
        """At least two weights, and made of other modules (or a recurrent layer, which keeps a state per step)."""
        return isinstance(module, nn.RNNBase) or (self.weights(module) >= 2 and not is_leaf(module))

    def is_candidate(self, module: nn.Module) -> bool:
        """Can be a block of its own: heavy, called as a module, and more than a plain list of others."""
        return type(module) not in CONTAINERS and self.is_heavy(module) and can_be_patched(module)

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
        """Little more than a list of modules of one repeated class, as `_DenseBlock` or timm's `ConvNeXtStage` are."""
        parts = [module] if isinstance(module, CONTAINERS) else list(module.children())
        heavy = [part for part in parts if self.is_heavy(part)]
        return bool(heavy) and all(isinstance(part, CONTAINERS) and self._only_repeats(part) for part in heavy)

    def _only_repeats(self, container: nn.Module) -> bool:
        items = list(container.children())
        if all(type(item) in CONTAINERS for item in items):
            return all(self._only_repeats(item) for item in items)
        return len({type(item) for item in items}) == 1 and type(items[0]) in self.repeated

    def outermost_candidates(self) -> Iterator[tuple[str, nn.Module]]:
        """The largest parts below the first level at which the model has more than one heavy part."""
        parent, prefix = self.model, ""
        while True:
            heavy = [(name, child) for name, child in parent.named_children() if self.is_heavy(child)]
            if len(heavy) != 1:
                break
            name, parent = heavy[0]
            prefix += f"{name}."
        for name, child in heavy:
            if self.is_candidate(child):
                yield prefix + name, child


def is_leaf(module: nn.Module) -> bool:
    """Made of no other modules; the parametrizations of its own parameters do not count."""
    return all(name == "parametrizations" for name, _ in module.named_children())


def can_be_patched(module: nn.Module) -> bool:
    """Has a forward of its own that an instance attribute can take the place of."""
    return type(module).forward is not nn.Module.forward and not isinstance(module, torch.jit.ScriptModule)


def is_plain_sequential(module: nn.Module) -> bool:
    """Runs its children one after the other and does nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's model inside DistributedDataParallel, DataParallel and torch.compile: block names start there."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model
