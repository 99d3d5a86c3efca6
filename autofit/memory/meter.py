"""Meters: how a device says what a step needed, and how it is kept from giving more than the cap."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from autofit.errors import ConfigError


@dataclass(frozen=True)
class Reading:
    """Peaks since a meter was started, and how often the allocator had to give back what it cached and try again."""

    peak_reserved_bytes: int
    peak_allocated_bytes: int
    alloc_retries: int


class Meter(ABC):
    """What a training step needs on one device.

    `source` says in a plan where the figures come from: "measured: …", or that they were tracked.
    """

    source: str

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def outside_bytes(self) -> int:
        """Bytes that this process uses on the device outside the allocator: context, kernels, libraries."""

    @abstractmethod
    def capped(self, cap_bytes: int) -> AbstractContextManager[None]:
        """Keeps the allocator within `cap_bytes`; puts back the cap that was set before."""

    @abstractmethod
    def metered(
        self, *, cap_bytes: int | None, resident: Iterable[torch.Tensor]
    ) -> AbstractContextManager[Callable[[], Reading]]:
        """Meters what runs inside; the callable gives the peaks so far, and after the block those of the block.

        `cap_bytes` is a cap for this run; None leaves the one that is set, if any. `resident` is what lies on the
        device already (parameters, buffers, optimizer state, gradients); where the allocator knows that by itself,
        it is not looked at. What finds no room raises `torch.OutOfMemoryError`, or what the device raises instead, and
        the callable gives the peaks after that too. Entering raises when not even `resident` finds room.
        """

    @abstractmethod
    def release(self) -> None:
        """Collects garbage, waits for the device and gives cached memory back to it.

        Call it outside of `except`, when no traceback holds the frames of a failed run any more.
        """

    @abstractmethod
    def allocated_bytes(self) -> int:
        """Bytes of all tensors alive on the device now, for a comparison of before and after."""


def meter_for(device: torch.device) -> Meter:
    """The meter of a device; raises ConfigError for a kind of device that nothing is known about."""
    if device.type == "cpu":
        from autofit.memory.tracked import TrackedMeter

        return TrackedMeter(device)
    if device.type == "cuda":
        from autofit.memory.cuda import CudaMeter

        return CudaMeter(device)
    if device.type == "xpu":
        from autofit.memory.statistics import StatisticsMeter

        return StatisticsMeter(device)
    if device.type == "mps":
        from autofit.memory.mps import MpsMeter

        return MpsMeter(device)
    raise ConfigError(f"Memory on '{device}' cannot be metered. Allowed: 'cpu', 'cuda', 'xpu' and 'mps'.")


@contextmanager
def until_exit(read: Callable[[], Reading]) -> Iterator[Callable[[], Reading]]:
    """Yields `read`, and makes what was yielded repeat its last reading once the block is over."""
    last: Reading | None = None

    def current() -> Reading:
        return read() if last is None else last

    try:
        yield current
    finally:
        last = read()
