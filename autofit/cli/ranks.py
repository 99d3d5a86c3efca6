"""The command line under torchrun: every rank runs it, and rank 0 speaks for all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def is_silent() -> bool:
    """Whether this process is one of several that torchrun started, and not the first."""
    return int(os.environ.get("RANK", "0")) != 0 and _started_by_torchrun()


def _started_by_torchrun() -> bool:
    return {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


@contextmanager
def process_group(device: str | None) -> Iterator[None]:
    """The process group of the ranks that torchrun started; nothing where it started none, or only one.

    On GPUs each rank takes the one of its number on this host.
    """
    import torch  # here, since `is_silent` is asked where nothing else needs it
    import torch.distributed as dist

    if not _started_by_torchrun() or int(os.environ["WORLD_SIZE"]) == 1 or dist.is_initialized():
        yield
        return
    on_gpus = torch.cuda.is_available() and (device is None or torch.device(device).type == "cuda")
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpus else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
