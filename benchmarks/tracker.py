"""What the storage tracker adds to an operator: it sees every one of a trial on a device that has no allocator to ask.

    python -m benchmarks.tracker [--rounds 15] [--out FILE]

Small operators run with and without it, in turns, on one thread; CPU microseconds an operator, medians over the rounds.
A dispatch mode that does nothing is shown beside it: below that no tracker written in Python can come.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.memory import CachingAllocator
from autofit.memory.tracker import StorageTracker
from benchmarks.results import add_out, write

OPERATORS = 4000


class Idle(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes everything on."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def measure(watch: AbstractContextManager[Any]) -> float:
    """CPU seconds an operator; each makes a tensor and lets go of the one before."""
    value = torch.ones(64)
    with torch.no_grad(), watch:
        began = time.thread_time()
        for _ in range(OPERATORS):
            value = value.add(1.0)
        return (time.thread_time() - began) / OPERATORS


def main() -> None:
    """Measures and prints one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    add_out(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {"alone": [], "idle_mode": [], "tracker": []}
    for _ in range(options.rounds):
        times["alone"].append(measure(nullcontext()))
        times["idle_mode"].append(measure(Idle()))  # type: ignore[no-untyped-call]
        times["tracker"].append(measure(StorageTracker("cpu", allocator=CachingAllocator())))
    micro = {name: statistics.median(values) * 1e6 for name, values in times.items()}
    figures = {
        "tracker_microseconds": round(micro["tracker"] - micro["alone"], 2),
        "idle_mode_microseconds": round(micro["idle_mode"] - micro["alone"], 2),
        "tracker_over_idle_mode": round((micro["tracker"] - micro["alone"]) / (micro["idle_mode"] - micro["alone"]), 2),
    }
    print(" ".join(f"{name}={value}" for name, value in figures.items()))
    write(options.out, figures=figures, rows=[{"watch": name, "microseconds": value} for name, value in micro.items()])


if __name__ == "__main__":
    main()
