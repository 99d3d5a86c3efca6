"""A device that is none: the module functions of `torch.cuda`, `torch.xpu` and `torch.mps`, answered by the allocator
model from what tensors on the CPU do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from autofit.memory import CachingAllocator, StorageTracker
from autofit.units import GiB, MiB

TOTAL_BYTES = 4 * GiB - 12345  # not round, as real devices are not
OUTSIDE_BYTES = 300 * MiB  # context and libraries
FOREIGN_BYTES = 700 * MiB  # other processes


class SimulatedDevice:
    """Enter it, and what tensors on the CPU need counts as needed on the device."""

    def __init__(self) -> None:
        self.tracker = StorageTracker("cpu", allocator=CachingAllocator())
        self.memory = self  # torch.cuda.memory has what torch.cuda has
        self.fraction = 1.0
        self.synchronized = 0

    def __enter__(self) -> SimulatedDevice:
        self.tracker.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self.tracker.__exit__(*details)

    @property
    def allocator(self) -> CachingAllocator:
        """The model, with all deaths counted."""
        allocator = self.tracker.allocator
        assert allocator is not None
        return allocator

    def memory_stats(self, device: Any) -> dict[str, int]:
        allocator = self.allocator
        return {
            "reserved_bytes.all.current": allocator.reserved_bytes,
            "reserved_bytes.all.peak": allocator.peak_reserved_bytes,
            "allocated_bytes.all.current": allocator.allocated_bytes,
            "allocated_bytes.all.peak": allocator.peak_allocated_bytes,
            "num_alloc_retries": allocator.retries,
        }

    def reset_peak_memory_stats(self, device: Any) -> None:
        self.allocator.reset_peaks()

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return TOTAL_BYTES - OUTSIDE_BYTES - FOREIGN_BYTES - self.allocator.reserved_bytes, TOTAL_BYTES

    def get_device_properties(self, device: Any) -> SimpleNamespace:
        return SimpleNamespace(total_memory=TOTAL_BYTES, uuid="4d2f")

    def get_per_process_memory_fraction(self, device: Any) -> float:
        return self.fraction

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        self.fraction = fraction
        self.allocator.limit_bytes = int(fraction * TOTAL_BYTES) if fraction < 1 else None

    def synchronize(self, device: Any = None) -> None:
        self.synchronized += 1

    def empty_cache(self) -> None:
        self.allocator.empty_cache()

    def driver_allocated_memory(self) -> int:
        return self.allocator.reserved_bytes

    def current_allocated_memory(self) -> int:
        return self.allocator.allocated_bytes

    def recommended_max_memory(self) -> int:
        return TOTAL_BYTES
