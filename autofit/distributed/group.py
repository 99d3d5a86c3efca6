"""The process group that this process is in, if it is in one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import cast

from torch import distributed


def is_grouped() -> bool:
    """Whether the default process group is there."""
    return distributed.is_available() and distributed.is_initialized()


def world_size() -> int:
    """Ranks in the default process group; 1 where there is none."""
    return distributed.get_world_size() if is_grouped() else 1


def rank() -> int:
    """This process's rank in the default process group; 0 where there is none."""
    return distributed.get_rank() if is_grouped() else 0


def new_group(
    *, ranks: Sequence[int] | None = None, backend: str | None = None, seconds: float | None = None
) -> distributed.ProcessGroup:
    """A group beside the default one, made by all of its ranks; of its backend and timeout unless others are named."""
    timeout = None if seconds is None else timedelta(seconds=seconds)
    group = distributed.new_group(None if ranks is None else list(ranks), timeout=timeout, backend=backend)
    return cast(distributed.ProcessGroup, group)
