"""Does anything stay behind? Many trials in one process, half of them out of memory.

    python -m benchmarks.leaks [--trials 100] [--out FILE]

After every tenth trial: live tensors, objects that the garbage collector knows, and host memory beyond what the process
had after the first trials and one snapshot. Exits 1 when any of them grows.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from autofit.batch import infer_layout
from autofit.candidate import Candidate
from autofit.memory import meter_for
from autofit.optimizers import optimizer_factory
from autofit.snapshot import restored
from autofit.trial import TrialSetup, run_trial
from autofit.units import MiB
from benchmarks.results import add_out, write

CPU = torch.device("cpu")
SETTLED_AFTER = 20  # trials in which caches of torch and Python fill
ALLOWED_OBJECTS = 200
ALLOWED_HOST_BYTES = 8 * MiB


def model() -> nn.Module:
    """Convolutions with BatchNorm and dropout, and an optimizer state of 8 MiB."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.1), nn.AdaptiveAvgPool2d(16),
        nn.Flatten(), nn.Linear(32 * 16 * 16, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def host_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def reading() -> dict[str, int]:
    """Live tensors, objects and host memory now."""
    gc.collect()
    things = gc.get_objects()
    tensors = sum(1 for thing in things if issubclass(type(thing), torch.Tensor))
    return {"live_tensors": tensors, "gc_objects": len(things), "host_bytes": host_bytes()}


def run(trials: int) -> list[dict[str, int]]:
    """Readings after every tenth trial; odd trials run out of memory."""
    network = model()
    batch = (torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,)))
    readings = []
    with ExitStack() as stack:
        snapshot = stack.enter_context(restored(network, None, device=CPU))
        setup = TrialSetup(
            model=network,
            sample_batch=batch,
            layout=infer_layout(batch),
            samples=256,
            device=CPU,
            meter=meter_for(CPU),
            cap_bytes=64 * MiB,
            outside_bytes=0,
            snapshot=snapshot,
            make_optimizer=optimizer_factory(None, network),
        )
        failed = 0
        for number in range(1, trials + 1):
            size = 256 if number % 2 else 4
            trial = run_trial(Candidate(micro_batch_size=size, accumulation_steps=256 // size), setup)
            failed += trial.outcome == "out_of_memory"
            assert trial.outcome == ("out_of_memory" if number % 2 else "feasible"), trial
            if number % 10 == 0:
                readings.append({"trial": number, "out_of_memory": failed, **reading()})
    return readings


def growth(readings: list[dict[str, int]]) -> dict[str, int]:
    """From the first half of the readings after caches have filled to the second half, each at its highest.

    Host memory goes up and down with what the C library keeps, so single readings would not compare.
    """
    settled = [r for r in readings if r["trial"] >= SETTLED_AFTER]
    halves = settled[: len(settled) // 2], settled[len(settled) // 2 :]
    return {
        name: max(r[name] for r in halves[1]) - max(r[name] for r in halves[0])
        for name in ("live_tensors", "gc_objects", "host_bytes")
    }


def main() -> int:
    """Prints the table; 1 when something grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="a multiple of 10, 40 or more")
    add_out(parser)
    arguments = parser.parse_args()
    readings = run(arguments.trials)
    print(f"{'trial':>6} {'out of memory':>14} {'live tensors':>13} {'gc objects':>11} {'host MiB':>9}")
    for r in readings:
        row = f"{r['trial']:6} {r['out_of_memory']:14} {r['live_tensors']:13} {r['gc_objects']:11}"
        print(f"{row} {r['host_bytes'] / MiB:9.1f}")
    grown = growth(readings)
    print(f"growth from the first to the second half after trial {SETTLED_AFTER}: {grown}")
    write(arguments.out, figures={"trials": arguments.trials, **grown}, rows=readings)
    flat = (
        grown["live_tensors"] <= 0
        and grown["gc_objects"] <= ALLOWED_OBJECTS
        and grown["host_bytes"] <= ALLOWED_HOST_BYTES
    )
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
