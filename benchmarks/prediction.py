"""Predicted against measured memory.

python -m benchmarks.prediction --measured FILE.csv    published runs on real GPUs, predicted without one
python -m benchmarks.prediction                        the tracked meter on this machine's CPU
"""

from __future__ import annotations

import argparse
import csv
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from autofit.gpus import find_gpu
from autofit.memory import Peaks, replay
from autofit.predict.line import SizedTrace
from autofit.predict.prediction import allocator_events
from autofit.predict.recorder import Phase
from autofit.predict.scratch import CUDA_CONTEXT_BYTES
from autofit.predict.tracing import following
from autofit.units import GiB, MiB
from benchmarks.measured_runs import Run, make_batch, make_model, train
from benchmarks.metered_steps import compare_all

GPU_NAMES = {"A100 SXM4 40GB": "A100 40GB"}
# What the study's figure holds above the allocator's reserved bytes; on the RTX 3060 it is 18 or 54 MiB.
OFFSETS = {"RTX 3060": 36 * MiB, "RTX 4060": 14 * MiB, "A100 SXM4 40GB": 354 * MiB}


def predict_run(run: Run, gpu: str) -> Peaks:
    """Peaks of one published run under what that GPU has left beside its context."""
    known = find_gpu(GPU_NAMES.get(gpu, gpu))
    device = torch.device("cuda:0")
    model = make_model(run.model)
    phase: list[Phase] = ["setup"]
    with following(model, device=device, capability=known.capability) as (recorder, _):
        recorder.phase = lambda: phase[0]
        for tensor in (*model.parameters(), *model.buffers()):
            recorder.adopt(tensor, "weights")
        with recorder.outside():
            batch = make_batch(run)
        train(model, run, batch, device, lambda name: phase.__setitem__(0, name))
        trace = recorder.trace
    return replay(allocator_events(SizedTrace(trace, trace.sizes)), known.total_bytes - CUDA_CONTEXT_BYTES)


def against_measured(path: Path) -> float:
    """Prints a line for each run of the file and returns the median error in per cent over the runs that fitted."""
    errors, study_errors, agreed = [], [], 0
    print(f"{'model':42} {'batch':>5} {'optimizer':9} {'gpu':14} measured predicted   error    xMem")
    rows = list(csv.DictReader(path.open(encoding="utf-8")))
    for row in rows:
        run = Run(row["model"], int(row["batch"]), row["optimiser"], int(row["zero_grad_mode"]))
        began = time.perf_counter()
        peaks = predict_run(run, row["gpu"])
        seconds = time.perf_counter() - began
        measured, ran_out = int(row["measured_bytes"]), row["real_oom"] == "1"
        predicted = peaks.peak_reserved_bytes + OFFSETS[row["gpu"]]
        error = 100 * (predicted - measured) / measured
        study_error = 100 * (float(row["xmem_pred"]) - measured) / measured
        agreed += peaks.fits != ran_out
        if not ran_out:
            errors.append(abs(error))
            study_errors.append(abs(study_error))
        outcome = f"{'; ran out' if ran_out else ''}{'' if peaks.fits else '; predicted to run out'}"
        print(
            f"{run.model:42} {run.batch:5} {run.optimizer:9} {row['gpu']:14} {measured / GiB:7.3f}G "
            f"{predicted / GiB:8.3f}G {error:+7.2f}% {study_error:+6.2f}% {seconds:6.1f} s{outcome}",
            flush=True,
        )
    print(f"runs that fitted: {len(errors)}; fits or not told right: {agreed} of {len(rows)}")
    print(f"p90_abs_error={percentile(errors, 90):.2f}%; xMem on the same runs: {statistics.median(study_errors):.2f}%")
    return statistics.median(errors)


def against_meter() -> float:
    """Prints predictions beside the tracked meter's readings and returns the median error in per cent."""
    errors = []
    print(f"{'model':20} {'candidate':46} {'optimizer':9}    metered  predicted   error")
    for name, optimizer, candidate, metered, predicted in compare_all():
        error = 100 * (predicted - metered) / metered
        errors.append(abs(error))
        print(
            f"{name:20} {candidate!s:46} {optimizer:9} {metered / MiB:8.1f} M {predicted / MiB:8.1f} M {error:+7.3f}%",
            flush=True,
        )
    print(f"p95_abs_error={percentile(errors, 95):.2f}%")
    return statistics.median(errors)


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that `percent` per cent of at least two values do not exceed, interpolated."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def main(arguments: list[str] | None = None) -> int:
    """Prints a table; the last line is the median error."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prediction", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--measured", type=Path, metavar="FILE.csv", help="published runs to predict")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    median = against_measured(options.measured) if options.measured else against_meter()
    print(f"median_abs_error={median:.2f}%")
    return 0


if __name__ == "__main__":
    sys.exit(main())
