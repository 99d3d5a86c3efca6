"""A block's call, recomputed in backward as it ran in forward: same arguments, same buffers, same random numbers."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from autofit.step.selection import selective_contexts

Forward = Callable[..., Any]

# What is copied when a call is recorded. Other containers are handed back as they are: copying one that a library
# defined could cut it off from whoever else holds it.
_COPIED = (list, tuple, dict, OrderedDict)


def recomputed(forward: Forward, *, modules: Sequence[nn.Module], selective: bool = False) -> Forward:
    """`forward`, keeping only its arguments for backward, and run again there on what it was given.

    With `selective` what its matrix products, convolutions and attention gave is kept as well (`KEPT_OPERATORS`).

    `modules` are all that run in it, of every level: a recomputation sees their buffers as the first run saw them, and
    what it writes there is dropped. So BatchNorm counts a batch once, and spectral norm recomputes the weight it used.
    What else a module changes about itself, in plain attributes, it changes again.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiler traces plain checkpoints, and writes buffers once by itself
            if selective:
                kwargs["context_fn"] = selective_contexts
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        call = _Call(forward, args, kwargs)
        guards = partial(_guards, modules) if any(module._buffers for module in modules) else None
        if selective:
            context_fn = partial(_guarded_selection, guards) if guards else selective_contexts
            return checkpoint(call, *call.leaves(), use_reentrant=False, context_fn=context_fn)
        if guards:
            return checkpoint(call, *call.leaves(), use_reentrant=False, context_fn=guards)
        return checkpoint(call, *call.leaves(), use_reentrant=False)

    run.__wrapped__ = forward  # type: ignore[attr-defined]  # inspect.signature finds it; functools.wraps takes 5 µs
    return run


class _Call:
    """The first call goes through with the arguments themselves, later ones with copies of their containers.

    A parent may go on filling a list that it has passed (as DenseNet does), and a block may fill one itself. All
    tensors become positional arguments of `checkpoint`, which looks only there for devices whose random state counts
    and for tensors that were changed since.
    """

    def __init__(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forward = forward
        self._original: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._leaves, self._spec = tree_flatten((args, kwargs), is_leaf=lambda node: type(node) not in _COPIED)

    def leaves(self) -> list[Any]:
        """The arguments without their containers, handed over once."""
        leaves, self._leaves = self._leaves, []
        return leaves

    def __call__(self, *leaves: Any) -> Any:
        if self._original is not None:
            (args, kwargs), self._original = self._original, None
        else:
            args, kwargs = tree_unflatten(leaves, self._spec)
        return self._forward(*args, **kwargs)


def _guarded_selection(
    guards: Callable[[], tuple[_Recording, _Replaying]],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    outer, inner = guards(), selective_contexts()
    return _Both(outer[0], inner[0]), _Both(outer[1], inner[1])


class _Both:
    """Two contexts as one that can be entered again, as a graph that is retained asks for."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        try:
            self._inner.__enter__()
        except BaseException:
            self._outer.__exit__(*sys.exc_info())
            raise

    def __exit__(self, *exception: Any) -> None:
        try:
            self._inner.__exit__(*exception)
        finally:
            self._outer.__exit__(*exception)


def _guards(modules: Sequence[nn.Module]) -> tuple[_Recording, _Replaying]:
    recording = _Recording(modules)
    return recording, _Replaying(recording)


class _Recording:
    """Around the first run: keeps the values of the buffers that the run writes, as they were before."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._before: list[_Before] = []
        self.written: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None]] = []

    def __enter__(self) -> None:
        copies = _Copies()
        self._before = [
            _Before(module, name, buffer, _version(buffer), copies.of(buffer))
            for module in self._modules
            for name, buffer in module._buffers.items()
        ]

    def __exit__(self, *exception: object) -> None:
        self.written = [(entry.module._buffers, entry.name, entry.copy) for entry in self._before if entry.is_written()]
        self._before.clear()


class _Before(NamedTuple):
    """One buffer before a run."""

    module: nn.Module
    name: str
    buffer: torch.Tensor | None
    version: int
    copy: torch.Tensor | None

    def is_written(self) -> bool:
        """Whether the run has written the buffer, or may have: running statistics are updated without a new version."""
        buffer = self.buffer
        if self.module._buffers.get(self.name) is not buffer or _version(buffer) != self.version:
            return True
        return buffer is not None and buffer.ndim == 1 and buffer.is_floating_point() and self.module.training


class _Replaying:
    """Around a recomputation: puts back what the first run saw, and afterwards what was there."""

    def __init__(self, recording: _Recording) -> None:
        self._recording = recording
        self._present: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None]] = []

    def __enter__(self) -> None:
        copies = _Copies()  # of the copies: a graph that is retained is recomputed more than once
        # All before the first swap: memory may run out here, and then nothing would be put back.
        before = [(place, name, copies.of(copy)) for place, name, copy in self._recording.written]
        for place, name, buffer in before:
            self._present.append((place, name, place.get(name)))
            place[name] = buffer

    def __exit__(self, *exception: object) -> None:
        for place, name, present in self._present:
            place[name] = present
        self._present.clear()


class _Copies:
    """Clones of buffers, one per tensor, so that what was shared stays shared."""

    def __init__(self) -> None:
        self._known: dict[int, torch.Tensor] = {}

    def of(self, buffer: torch.Tensor | None) -> torch.Tensor | None:
        if buffer is None:
            return None
        if id(buffer) not in self._known:
            self._known[id(buffer)] = buffer.detach().clone()
        return self._known[id(buffer)]


def _version(buffer: torch.Tensor | None) -> int:
    return 0 if buffer is None or buffer.is_inference() else buffer._version
