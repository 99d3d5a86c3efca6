"""The states of all global random generators: read, and put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch


class RandomStates:
    """Torch's generators of the host and of `device`, Python's, and NumPy's if it is loaded, at one moment."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]  # an unborn generator has no state to keep
        self._before = [(write, read()) for read, write in (*_torch_generators(device), *_host_generators())]

    def put_back(self) -> list[str]:
        """Sets every generator to what it was; there is none that it could not set."""
        for write, state in self._before:
            write(state)
        return []


class StepRandomStates:
    """The random states at the start of each training step, for as little time as that can take.

    Reading NumPy's generator takes longer than the rest of a step's bookkeeping, and hardly any model uses it or
    Python's. Those two are read at every step until they have stayed what they were over `SETTLED` steps, and from then
    on at every `SETTLED`th, until one is seen to change again.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
        self._device = device
        self._torch: list[tuple[Callable[[Any], Any], Any]] = []
        self._host: list[tuple[Callable[[Any], Any], Any]] = []
        self._calm_steps = 0

    def mark(self) -> None:
        """This is the start of a step."""
        self._torch = [(write, read()) for read, write in _torch_generators(self._device)]
        settled = self._calm_steps >= SETTLED and self._calm_steps % SETTLED
        self._host = [] if settled else [(write, read()) for read, write in _host_generators()]

    def passed(self) -> None:
        """The step went well."""
        if not self._host:
            self._calm_steps += 1
            return
        now = [read() for read, _ in _host_generators()]
        calm = len(now) == len(self._host) and all(_same(a, b) for a, (_, b) in zip(now, self._host, strict=True))
        self._calm_steps = self._calm_steps + 1 if calm else 0

    def put_back(self) -> None:
        """Sets every generator that was read to what it was at the start of the step."""
        for write, state in (*self._torch, *self._host):
            write(state)


# Steps that a generator of Python or NumPy must stay untouched before it is read less often.
SETTLED = 16


def _same(a: Any, b: Any) -> bool:
    """Whether two states of Python's generator, or two of NumPy's, are equal."""
    if len(a) == 3:
        return bool(a == b)
    return a[0] == b[0] and a[2:] == b[2:] and bool((a[1] == b[1]).all())


_Generator = tuple[Callable[[], Any], Callable[[Any], Any]]


def _torch_generators(device: torch.device) -> list[_Generator]:
    found: list[_Generator] = [(torch.get_rng_state, torch.set_rng_state)]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found.append((torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all))
    if device.type in ("mps", "xpu"):
        backend = getattr(torch, device.type)
        found.append((backend.get_rng_state, backend.set_rng_state))
    return found


def _host_generators() -> list[_Generator]:
    found: list[_Generator] = [(random.getstate, random.setstate)]
    if "numpy" in sys.modules:
        numpy_random = sys.modules["numpy"].random
        found.append((numpy_random.get_state, numpy_random.set_state))
    return found
