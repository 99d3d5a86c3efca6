"""What modules and optimizers hold beside tensors' bytes: remembered in place, and put back.

Followed are dicts, lists, sets, deques and tuples, and the attributes of objects of the model's own package: of a
helper that counts, say, but not of a data set or a trainer of some library. Restored are which objects they held, and
the contents of NumPy arrays and generators, `random.Random`, `bytearray` and `torch.Generator`. Not restored is what
objects keep in `__slots__` or outside Python.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

_CONTAINERS = (dict, list, set, deque)


class Attributes:
    """Attributes of modules, and what is added: which objects every container held, and values that change in place.

    `tensors` are all that were found on the way, by id, with a name.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self.tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self._own_packages = {_package(module) for module in modules} - {"torch", "builtins"}
        self._values: list[Callable[[], object]] = []
        self._held: list[tuple[Any, Any]] = []
        self._kept: list[Any] = []  # so that no other object takes the id of one that was seen
        self._seen: set[int] = set()
        for module in modules:
            self._add_object(module, type(module).__name__)

    def add(self, value: Any, name: str) -> None:
        """Remembers a value and, within containers, everything below it."""
        if isinstance(value, torch.Tensor):
            self.tensors.setdefault(id(value), (name, value))
        elif isinstance(value, tuple):
            for item in value:
                self.add(item, name)
        elif isinstance(value, _CONTAINERS):
            if self._is_new(value):
                self._add_container(value, name)
        elif (put_back := _rewriting(value)) is not None:
            if self._is_new(value):
                self._values.append(put_back)
        elif isinstance(value, nn.Module) or self._is_own(value):
            self._add_object(value, name)

    def put_back(self) -> list[str]:
        """Puts everything back; the names of what could not be are none."""
        for container, items in self._held:
            if isinstance(container, dict):
                now: list[Any] = list(container.items())
                if not _same_items([part for pair in now for part in pair], [part for pair in items for part in pair]):
                    container.clear()
                    container.update(items)
            elif not _same_items(list(container), items):
                container.clear()
                container.update(items) if isinstance(container, set) else container.extend(items)
        for put_back in self._values:
            put_back()
        return []

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        self._kept.append(value)
        return True

    def _is_own(self, value: Any) -> bool:
        """An object of the model's own package, with attributes; no class, function or module of Python's."""
        return (
            not isinstance(value, (type, ModuleType))
            and hasattr(value, "__dict__")
            and not hasattr(value, "__code__")
            and _package(value) in self._own_packages
        )

    def _add_object(self, value: Any, name: str) -> None:
        if self._is_new(value):
            self.add(vars(value), name)

    def _add_container(self, value: Any, name: str) -> None:
        items: list[Any] = list(value.items()) if isinstance(value, dict) else list(value)
        self._held.append((value, items))
        for item in items:
            if isinstance(value, dict):
                self.add(item[0], name)  # optimizer state is keyed by its parameters
                self.add(item[1], f"{name}.{item[0]}" if isinstance(item[0], str) else name)
            else:
                self.add(item, name)


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _rewriting(value: Any) -> Callable[[], object] | None:
    """How to put back a value that changes in place; None for one that does not, or of which that is not known."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state) and None
    if isinstance(value, random.Random):
        numbers = value.getstate()
        return lambda: value.setstate(numbers)
    if isinstance(value, (np.random.Generator, np.random.RandomState)):
        return _rewriting_numpy(value)
    if isinstance(value, np.ndarray) and value.flags.writeable:
        elements = value.copy()
        return lambda: np.copyto(value, elements)
    if isinstance(value, bytearray):
        content = bytes(value)
        return lambda: value.__setitem__(slice(None), content)
    return None


def _rewriting_numpy(value: np.random.Generator | np.random.RandomState) -> Callable[[], object]:
    if isinstance(value, np.random.RandomState):
        numbers = value.get_state()
        return lambda: value.set_state(numbers)
    bits = value.bit_generator
    state = bits.state
    return lambda: setattr(bits, "state", state)


def _same_items(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
