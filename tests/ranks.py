"""Real processes in a process group, for tests: small, on the CPU, over gloo."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

# Forked from a server that has imported what takes long, so that a process costs little.
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch._dynamo", "torch.nn.parallel.distributed", "autofit.tuner", "tests.ranks"])
_GROUP_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Ended:
    """How one rank ended: with a result, with an error, or killed by a signal."""

    result: Any = None
    error: BaseException | None = None
    trace: str = ""
    signal: int | None = None


def run_ranks(
    work: Callable[..., Any], size: int, *arguments: Any, timeout: float = 120.0, stuck: int | None = None
) -> list[Ended]:
    """`work(rank, *arguments)` in `size` processes of one process group; how each ended, by rank.

    `work` is a function of a module. A process that has not ended after `timeout` seconds has a TimeoutError; one that
    is expected to be `stuck` is waited for last, and not for long.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = _SERVER.Pipe(duplex=False)
            process = _SERVER.Process(target=_enter, args=(theirs, folder, rank, size, work, arguments), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        deadline = time.monotonic() + timeout
        try:
            ended: dict[int, Ended] = {}
            for rank in sorted(range(size), key=lambda rank: rank == stuck):
                limit = time.monotonic() + 0.1 if rank == stuck else deadline
                ended[rank] = _ended(pipes[rank], processes[rank], limit, rank)
            return [ended[rank] for rank in range(size)]
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):  # it may end just now
                    if process.is_alive():
                        os.kill(process.pid, signal.SIGKILL)  # also one that was stopped
                process.join()


def results(ended: list[Ended]) -> list[Any]:
    """What the ranks returned; fails with the trace of one that did not."""
    for rank, end in enumerate(ended):
        assert end.error is None, f"rank {rank}: {end.trace}"
        assert end.signal is None, f"rank {rank} died of signal {end.signal}"
    return [end.result for end in ended]


def _ended(pipe: Connection, process: Any, deadline: float, rank: int) -> Ended:
    if pipe.poll(max(deadline - time.monotonic(), 0)):
        try:
            result, error, trace = pickle.loads(pipe.recv_bytes())
        except EOFError:
            process.join(5)
            return Ended(signal=-process.exitcode)
        return Ended(result, error, trace)
    if process.is_alive():
        return Ended(error=TimeoutError(f"rank {rank} hangs"), trace=f"rank {rank} hangs")
    return Ended(signal=-process.exitcode)


def _enter(
    pipe: Connection, folder: str, rank: int, size: int, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=_GROUP_TIMEOUT
        )
        answer = work(rank, *arguments), None, ""
    except BaseException as error:
        answer = None, error, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(answer))  # by value: the process is gone when they are read
    pipe.close()
    os._exit(0)  # what is left of broken process groups is not waited for
