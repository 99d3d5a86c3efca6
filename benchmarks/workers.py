"""How much sooner several workers on one storage end than one does, and whether any candidate was measured twice.

    python -m benchmarks.workers [--workers N …] [--width N] [--target-batch N] [--trials N] [--repeats N]

Each worker is a process with one thread that tunes the same model with the same `storage`. Per number of workers it
prints the seconds from the first call of tune() to the last plan (of `repeats` runs the shortest), the trials that were
run, how many of them had a candidate that another trial had already, and the ratio to one worker. Imports are left out:
workers start together, once all are ready. Run it where nothing else runs, on as many cores as workers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autofit
from autofit.candidate import SearchSpace
from autofit.plan import Plan

LAYERS = 6


def make_model(width: int) -> nn.Module:
    """Convolutions whose step takes some hundred milliseconds on one core."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
    for _ in range(LAYERS):
        layers += [nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 1))]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def work(storage: str, options: argparse.Namespace, start: Barrier, answers: Any) -> None:
    """One worker: its plan, and when it began and ended by the clock that all processes share."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batch = make_model(options.width), (torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,)))
    start.wait()
    began = time.monotonic()
    plan = autofit.tune(
        model,
        batch,
        target_batch=options.target_batch,
        device="cpu",
        budget="2GiB",
        space=SearchSpace(precision="float32", checkpointing="none", micro_batch_size=range(1, options.trials + 1)),
        max_trials=options.trials,
        storage=storage,
        study_name="workers",
    )
    answers.put((began, time.monotonic(), plan.to_json()))


def run(workers: int, options: argparse.Namespace) -> tuple[float, Plan]:
    """Seconds until the last of so many workers has its plan, and that plan, which has the trials of all."""
    context = multiprocessing.get_context("spawn")
    start, answers = context.Barrier(workers), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        storage = f"sqlite:///{Path(folder, 'study.db')}"
        arguments = (storage, options, start, answers)
        processes = [context.Process(target=work, args=arguments) for _ in range(workers)]
        for process in processes:
            process.start()
        found = [answers.get(timeout=options.timeout) for _ in processes]
        for process in processes:
            process.join()
    last = max(found, key=lambda answer: answer[1])
    return last[1] - min(began for began, _, _ in found), Plan.from_json(last[2])


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one line per number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--target-batch", type=int, default=32)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one run")
    options = parser.parse_args(arguments)
    one: float | None = None
    for workers in options.workers:
        seconds, plan = min((run(workers, options) for _ in range(options.repeats)), key=lambda result: result[0])
        tried = Counter(trial.candidate for trial in plan.trials)
        twice = sum(count - 1 for count in tried.values())
        one = seconds if workers == 1 else one
        ratio = f" speedup={one / seconds:.2f}" if one else ""
        print(f"workers={workers} seconds={seconds:.1f} trials={len(plan.trials)} measured_twice={twice}{ratio}")


if __name__ == "__main__":
    main()
