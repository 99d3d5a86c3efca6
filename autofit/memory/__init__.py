"""What a step needs in memory: the allocator model, storages followed through a step, and a meter for each device.

The allocator model needs no torch, so it is imported at once; what needs torch is imported when it is first used.
"""

from __future__ import annotations

from autofit.memory.allocator import AllocatorOutOfMemoryError, CachingAllocator
from autofit.memory.config import AllocatorConfig
from autofit.memory.pool import Block
from autofit.memory.replay import Event, Peaks, fit_threshold, replay

__all__ = [
    "CachingAllocator",
    "AllocatorConfig",
    "AllocatorOutOfMemoryError",
    "Block",
    "Event",
    "Peaks",
    "replay",
    "fit_threshold",
]
