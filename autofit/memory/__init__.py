"""What a step needs in memory: the allocator model, storages followed through a step, and a meter for each device.

The allocator model needs no torch, so it is imported at once; what needs torch is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autofit.memory.allocator import AllocatorOutOfMemoryError, CachingAllocator
from autofit.memory.config import AllocatorConfig
from autofit.memory.pool import Block
from autofit.memory.replay import Event, Peaks, fit_threshold, replay

if TYPE_CHECKING:
    from autofit.memory.meter import Meter, Reading, meter_for
    from autofit.memory.tracker import EventLog, StorageTracker

__all__ = [
    "CachingAllocator",
    "AllocatorConfig",
    "AllocatorOutOfMemoryError",
    "Block",
    "Event",
    "Peaks",
    "replay",
    "fit_threshold",
    "StorageTracker",
    "EventLog",
    "Meter",
    "Reading",
    "meter_for",
]

_HOMES = {
    "StorageTracker": "autofit.memory.tracker",
    "EventLog": "autofit.memory.tracker",
    "Meter": "autofit.memory.meter",
    "Reading": "autofit.memory.meter",
    "meter_for": "autofit.memory.meter",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'autofit.memory' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
