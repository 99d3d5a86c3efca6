"""Faults on purpose: something raises once, at the n-th operator, allocation, optimizer step, file write, storage call
or line of autofit.

    fault = Fault(ERRORS["memory"], at=17)
    with PLACES["operator"](fault):
        autofit.tune(…)
    assert fault.struck

With `at=0` a fault only counts what it could strike, which is how many injection points there are.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import optuna
import torch
from optuna.storages import RDBStorage
from optuna.storages._cached_storage import _CachedStorage
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import autofit
from autofit.memory.allocator import CachingAllocator

PACKAGE = str(Path(autofit.__file__).parent)


def _raising(kind: type[BaseException], *arguments: Any) -> Callable[[], NoReturn]:
    def strike() -> NoReturn:
        raise kind(*arguments)

    return strike


# What strikes: the errors that a step, a disk or a person can give.
ERRORS: dict[str, Callable[[], object]] = {
    "memory": _raising(torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB (injected)."),
    "host memory": _raising(MemoryError, "injected"),
    "runtime": _raising(RuntimeError, "injected"),
    "interrupt": _raising(KeyboardInterrupt),
    "exit": _raising(SystemExit, 7),
    "disk": _raising(OSError, 28, "No space left on device (injected)"),
    "storage": _raising(optuna.exceptions.StorageInternalError, "injected"),
    "signal": lambda: signal.raise_signal(signal.SIGINT),
}


@dataclass
class Fault:
    """Strikes once, at the `at`-th event that it is told of, and counts them all."""

    strike: Callable[[], object] = lambda: None
    at: int = 0
    seen: int = 0

    @property
    def struck(self) -> bool:
        """Whether it came to it."""
        return 0 < self.at <= self.seen

    def event(self) -> None:
        """Something happens that may fail."""
        self.seen += 1
        if self.seen == self.at:
            self.strike()


class _Operators(TorchDispatchMode):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self._fault = fault

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._fault.event()
        return func(*args, **(kwargs or {}))


def at_operator(fault: Fault) -> AbstractContextManager[Any]:
    """Operators on tensors, in forward, backward, the optimizer, and what autofit does around them."""
    return _Operators(fault)


@contextmanager
def _before(owner: Any, name: str, fault: Fault) -> Iterator[None]:
    """Every call of `owner.name` is an event before it does anything."""
    original = owner.__dict__[name]

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        fault.event()
        return original(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)


def at_allocation(fault: Fault) -> AbstractContextManager[Any]:
    """Allocations of the model of the CUDA allocator, under which the CPU's steps run."""
    return _before(CachingAllocator, "malloc", fault)


@contextmanager
def at_optimizer_step(fault: Fault) -> Iterator[None]:
    """Steps of any optimizer: an event before each and one after it."""
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: fault.event()),
        register_optimizer_step_post_hook(lambda *_: fault.event()),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


_WRITES = {"os.rename", "os.mkdir", "os.chmod", "os.remove"}
_writing: list[Fault] = []  # of the one audit hook, which cannot be removed


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _writing:
        return
    opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if event in _WRITES or opened:
        _writing[-1].event()


sys.addaudithook(_audit)


@contextmanager
def at_file_write(fault: Fault) -> Iterator[None]:
    """Whatever Python does to a file: opened for writing, renamed, removed; folders made."""
    _writing.append(fault)
    try:
        yield
    finally:
        _writing.remove(fault)


_STORAGE_CALLS = (
    "create_new_study",
    "create_new_trial",
    "set_trial_param",
    "set_trial_state_values",
    "set_trial_user_attr",
    "set_trial_system_attr",
    "get_all_trials",
    "get_trial",
)


@contextmanager
def at_storage_call(fault: Fault) -> Iterator[None]:
    """Calls that Optuna makes to the database of a study."""
    places = [(kind, name) for kind in (_CachedStorage, RDBStorage) for name in _STORAGE_CALLS if name in vars(kind)]
    originals = [vars(kind)[name] for kind, name in places]
    depth = 0

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                if depth == 1:  # the cache asks the database itself
                    fault.event()
                return original(*args, **kwargs)
            finally:
                depth -= 1

        return call

    for (kind, name), original in zip(places, originals, strict=True):
        setattr(kind, name, counted(original))
    try:
        yield
    finally:
        for (kind, name), original in zip(places, originals, strict=True):
            setattr(kind, name, original)


@contextmanager
def at_line(fault: Fault) -> Iterator[None]:
    """Lines of autofit's own code as they are run: where a signal may come in between."""

    def lines(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            fault.event()
        return lines

    def calls(frame: FrameType, event: str, argument: Any) -> Any:
        return lines if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(calls)
    try:
        yield
    finally:
        sys.settrace(before)


PLACES: dict[str, Callable[[Fault], AbstractContextManager[Any]]] = {
    "operator": at_operator,
    "allocation": at_allocation,
    "optimizer": at_optimizer_step,
    "file": at_file_write,
    "storage": at_storage_call,
    "line": at_line,
}


def spread(events: int, points: int) -> list[int]:
    """`points` of the events 1 to `events`, evenly; all where there are fewer."""
    if events <= points:
        return list(range(1, events + 1))
    return [1 + round(index * (events - 1) / (points - 1)) for index in range(points)]
