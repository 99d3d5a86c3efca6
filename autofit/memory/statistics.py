"""The meter of devices whose caching allocator keeps statistics: CUDA and XPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from autofit.memory.meter import Meter, Reading, until_exit


class StatisticsMeter(Meter):
    """Reads `memory_stats` of `torch.cuda` or `torch.xpu`, and sets the share of the device that this process may use.

    `runtime` is that module; it follows from the device.
    """

    def __init__(self, device: torch.device, *, runtime: Any = None) -> None:
        super().__init__(device)
        self._runtime = getattr(torch, device.type) if runtime is None else runtime
        self.source = f"measured: memory statistics of torch.{device.type}"

    def outside_bytes(self) -> int:
        """Whatever is in use on the device and not reserved by this process's allocator.

        That counts other processes as this one, so a cap computed from it may be lower than it need be, never higher.
        """
        free, total = self._runtime.mem_get_info(self.device)
        return max(int(total - free) - self._statistic("reserved_bytes.all.current"), 0)

    @contextmanager
    def capped(self, cap_bytes: int) -> Iterator[None]:
        """Sets the share of the device's memory that makes `cap_bytes`; all of it when that is above the device."""
        memory = self._runtime.memory
        total = self._runtime.get_device_properties(self.device).total_memory
        previous = memory.get_per_process_memory_fraction(self.device)
        # The allocator rounds share × total down; half a byte more, and it arrives at the cap itself.
        memory.set_per_process_memory_fraction(min((cap_bytes + 0.5) / total, 1.0), self.device)
        try:
            yield
        finally:
            memory.set_per_process_memory_fraction(previous, self.device)

    @contextmanager
    def metered(self, *, cap_bytes: int | None, resident: Iterable[torch.Tensor]) -> Iterator[Callable[[], Reading]]:
        """The allocator's own peaks, started again; `resident` is in them already."""
        with nullcontext() if cap_bytes is None else self.capped(cap_bytes):
            self._runtime.reset_peak_memory_stats(self.device)
            retries = self._statistic("num_alloc_retries")

            def read() -> Reading:
                return Reading(
                    peak_reserved_bytes=self._statistic("reserved_bytes.all.peak"),
                    peak_allocated_bytes=self._statistic("allocated_bytes.all.peak"),
                    alloc_retries=self._statistic("num_alloc_retries") - retries,
                )

            with until_exit(read) as current:
                yield current

    def release(self) -> None:
        """Collects garbage, waits for the device and empties the cache.

        Raises what the device raises when its context is lost. cuBLAS keeps its workspace, which is allocated once.
        """
        gc.collect()
        self._runtime.synchronize(self.device)
        self._runtime.empty_cache()

    def allocated_bytes(self) -> int:
        """What the allocator has handed out."""
        return self._statistic("allocated_bytes.all.current")

    def _statistic(self, name: str) -> int:
        """One of the allocator's figures; 0 before its first use, and where the device does not keep it."""
        return int(self._runtime.memory_stats(self.device).get(name, 0))
