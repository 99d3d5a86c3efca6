"""Predicted against measured memory.

python -m benchmarks.prediction                        the events of this machine's CPU allocator
python -m benchmarks.prediction --quick                the same over a few small models, in minutes
python -m benchmarks.prediction --measured FILE.csv    published runs on real GPUs, predicted without one
python -m benchmarks.prediction --meter                the tracked meter on this machine's CPU
"""

from __future__ import annotations

import argparse
import csv
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from autofit.gpus import find_gpu
from autofit.memory import Peaks, replay
from autofit.predict.line import SizedTrace
from autofit.predict.prediction import allocator_events
from autofit.predict.recorder import Phase
from autofit.predict.scratch import CUDA_CONTEXT_BYTES
from autofit.predict.tracing import following
from autofit.units import GiB, MiB
from benchmarks.host_steps import Row, compare, workloads
from benchmarks.measured_runs import Run, make_batch, make_model, train
from benchmarks.metered_steps import compare_all
from benchmarks.results import add_out, write

Figures = dict[str, float]
Result = tuple[Figures, list[dict[str, Any]]]

QUICK = ("mobilenet_v3_small", "squeezenet1_1", "vision_transformer", "Bert", "GPT2")
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


def against_measured(path: Path) -> Result:
    """Prints a line for each run of the file; errors in per cent over the runs that fitted."""
    errors, study_errors, agreed, found = [], [], 0, []
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
        found.append({**asdict(run), "gpu": row["gpu"], "ran_out": ran_out, "error_percent": round(error, 2)})
        if not ran_out:
            errors.append(abs(error))
            study_errors.append(abs(study_error))
        outcome = f"{'; ran out' if ran_out else ''}{'' if peaks.fits else '; predicted to run out'}"
        print(
            f"{run.model:42} {run.batch:5} {run.optimizer:9} {row['gpu']:14} {measured / GiB:7.3f}G "
            f"{predicted / GiB:8.3f}G {error:+7.2f}% {study_error:+6.2f}% {seconds:6.1f} s{outcome}",
            flush=True,
        )
    figures: Figures = {
        "runs": len(rows),
        "fits_told_right": agreed,
        "runs_that_fitted": len(errors),
        "median_error_percent": round(statistics.median(errors), 2),
        "p90_error_percent": round(percentile(errors, 90), 2),
        "xmem_median_error_percent": round(statistics.median(study_errors), 2),
        "xmem_p90_error_percent": round(percentile(study_errors, 90), 2),
    }
    return figures, found


def against_host(rows_path: Path | None, models: Sequence[str]) -> Result:
    """Prints predictions beside what the CPU's allocator reported; errors in per cent, traced only and calibrated.

    Rows are kept in `rows_path` as they come, and those that are there already are not run again.
    """
    rows = list(_read_rows(rows_path))
    print(f"{'model':19} {'optimizer':9} {'precision':9} {'recomputed':10} {'split':6}   measured    traced calibrated")
    for row in rows:
        _print_row(row)
    for workload in workloads():
        if models and workload.name not in models:
            continue
        for row in compare(workload, [row.key for row in rows]):
            rows.append(row)
            _print_row(row)
            if rows_path is not None:
                _append_row(rows_path, row)
    figures: Figures = {"rows": len(rows), "models": len({row.model for row in rows})}
    for name in ("traced", "calibrated"):
        errors = [abs(_error(row, name)) for row in rows]
        figures |= {
            f"{name}_median_percent": round(statistics.median(errors), 2),
            f"{name}_p95_percent": round(percentile(errors, 95), 2),
            f"{name}_largest_percent": round(max(errors), 2),
        }
    return figures, [asdict(row) for row in rows]


def _error(row: Row, name: str) -> float:
    predicted = row.traced_bytes if name == "traced" else row.calibrated_bytes
    return 100 * (predicted - row.measured_bytes) / row.measured_bytes


def _print_row(row: Row) -> None:
    print(
        f"{row.model:19} {row.optimizer:9} {row.precision:9} {row.checkpointing:10} {row.accumulation:6} "
        f"{row.measured_bytes / MiB:8.1f} M {_error(row, 'traced'):+8.3f}% {_error(row, 'calibrated'):+9.3f}%",
        flush=True,
    )


def _read_rows(path: Path | None) -> Iterator[Row]:
    if path is None or not path.exists():
        return
    with path.open(encoding="utf-8", newline="") as lines:
        for values in csv.DictReader(lines):
            yield Row(**{name: int(value) if name.endswith("_bytes") else value for name, value in values.items()})


def _append_row(path: Path, row: Row) -> None:
    new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, list(asdict(row)))
        if new:
            writer.writeheader()
        writer.writerow(asdict(row))


def against_meter() -> Result:
    """Prints predictions beside the tracked meter's readings; errors in per cent."""
    errors, rows = [], []
    print(f"{'model':20} {'candidate':46} {'optimizer':9}    metered  predicted   error")
    for name, optimizer, candidate, metered, predicted in compare_all():
        error = 100 * (predicted - metered) / metered
        errors.append(abs(error))
        rows.append(
            {"model": name, "candidate": str(candidate), "optimizer": optimizer, "error_percent": round(error, 3)}
        )
        print(
            f"{name:20} {candidate!s:46} {optimizer:9} {metered / MiB:8.1f} M {predicted / MiB:8.1f} M {error:+7.3f}%",
            flush=True,
        )
    figures: Figures = {
        "median_error_percent": round(statistics.median(errors), 2),
        "p95_error_percent": round(percentile(errors, 95), 2),
    }
    return figures, rows


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that `percent` per cent of at least two values do not exceed, interpolated."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def main(arguments: list[str] | None = None) -> int:
    """Prints a table; the last line sums it up."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prediction", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--measured", type=Path, metavar="FILE.csv", help="published runs to predict")
    parser.add_argument("--meter", action="store_true", help="compare with the tracked meter")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--models", nargs="+", default=(), metavar="NAME", help="only these")
    parser.add_argument("--rows", type=Path, metavar="FILE.csv", help="keep rows here, and go on where it stopped")
    add_out(parser)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler reports its own start and stop
    if options.measured:
        figures, rows = against_measured(options.measured)
    elif options.meter:
        figures, rows = against_meter()
    else:
        figures, rows = against_host(options.rows, QUICK if options.quick else options.models)
    print(" ".join(f"{name}={value}" for name, value in figures.items()))
    write(options.out, figures=figures, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
