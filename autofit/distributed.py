"""What the ranks of a process group are."""

from __future__ import annotations

from torch import distributed


def world_size() -> int:
    """Ranks in the default process group; 1 where there is none."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
