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
        self._before = [(write, read()) for read, write in _generators(device)]

    def put_back(self) -> list[str]:
        """Sets every generator to what it was; there is none that it could not set."""
        for write, state in self._before:
            write(state)
        return []


def _generators(device: torch.device) -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    found: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (random.getstate, random.setstate),
        (torch.get_rng_state, torch.set_rng_state),
    ]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found.append((torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all))
    if device.type in ("mps", "xpu"):
        backend = getattr(torch, device.type)
        found.append((backend.get_rng_state, backend.set_rng_state))
    if "numpy" in sys.modules:
        numpy_random = sys.modules["numpy"].random
        found.append((numpy_random.get_state, numpy_random.set_state))
    return found
