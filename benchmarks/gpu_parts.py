"""The parts of `benchmarks.gpu`: each takes a report, adds rows to it, and stops when the time is over."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autofit
from autofit.candidate import Candidate, Checkpointing, CheckpointingMode, Precision
from autofit.errors import AutofitError
from autofit.gpus import find_gpu
from autofit.predict import Predictor
from autofit.predict.step_predictor import StepPredictor
from autofit.preparation import Prepared, prepared
from autofit.step.blocks import discover_blocks
from autofit.trial import measure_need, run_trial
from benchmarks import snapshots
from benchmarks.gpu_models import MODELS, TINY, Build
from benchmarks.overhead import measure as measure_overhead

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
MODES: tuple[CheckpointingMode, ...] = ("none", "full", "selective")


class Report:
    """Rows of one part, written to its file after each."""

    def __init__(self, file: Path, *, environment: dict[str, Any], seconds: float, dry: bool) -> None:
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.models: dict[str, Build] = TINY if dry else MODELS
        self._file = file
        self._content: dict[str, Any] = {"environment": environment, "dry": dry, "finished": False, "rows": []}
        self._deadline = time.monotonic() + seconds
        self._write()

    @property
    def seconds_left(self) -> float:
        """Until the part should end."""
        return self._deadline - time.monotonic()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All so far."""
        rows: list[dict[str, Any]] = self._content["rows"]
        return rows

    def add(self, **row: Any) -> None:
        """Writes one more row."""
        self.rows.append(row)
        print(f"  {json.dumps(row)}", flush=True)
        self._write()

    def finish(self, **summary: Any) -> None:
        """The part is through, or out of time with what it has."""
        self._content |= summary
        self._content["finished"] = self._content["finished"] or self.seconds_left > 0
        self._write()

    def summarise(self, **summary: Any) -> None:
        """Figures over all rows."""
        print(f"  {json.dumps(summary)}", flush=True)
        self._content |= summary
        self._write()

    def _write(self) -> None:
        self._file.write_text(json.dumps(self._content, indent=1) + "\n")


def tests(report: Report) -> None:
    """The tests that are marked `gpu`."""
    if importlib.util.find_spec("pytest") is None:
        report.add(skipped="pytest is not installed")
        return
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command += ["--collect-only"] if report.dry else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=max(report.seconds_left, 10), check=False)
    report.add(exit=done.returncode, summary=done.stdout.strip().splitlines()[-1:], output=done.stdout[-4000:])


def allocator_snapshots(report: Report) -> None:
    """Recordings of the allocator in several configurations, replayed through the model."""
    if report.dry:
        report.add(**snapshots.judged(_made_up_recording()))
        return
    for kind in snapshots.KINDS:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "recording.json"
            settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if kind == "expandable" else {}
            command = [sys.executable, "-m", "benchmarks.snapshots", kind, str(file)]
            done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
            if done.returncode:
                report.add(kind=kind, failed=done.stderr[-500:])
            else:
                report.add(**snapshots.judged(json.loads(file.read_text())))


def _made_up_recording() -> dict[str, Any]:
    """In the form of a real one: two blocks of one segment."""
    trace = [
        {"action": "segment_alloc", "addr": 1 << 30, "size": 20 << 20},
        {"action": "alloc", "addr": 1 << 30, "size": 3 << 20},
        {"action": "alloc", "addr": (1 << 30) + (3 << 20), "size": 2 << 20},
        {"action": "free_requested", "addr": 1 << 30, "size": 3 << 20},
        {"action": "free_completed", "addr": 1 << 30, "size": 3 << 20},
    ]
    recording = snapshots.recording_of({"device_traces": [[], trace]}, reserved_bytes=20 << 20)
    peaks = {"peak_reserved_bytes": 20 << 20, "peak_allocated_bytes": 5 << 20, "retries": 0}
    return {**recording, **peaks, "kind": "default"}


def memory(report: Report) -> None:
    """Predicted against measured peaks, over models, precisions, checkpointing, optimizers and splits, in any order."""
    cases = list(product(report.models, OPTIMIZERS, _precisions(report), MODES, ((4, 1), (3, 2))))
    random.Random(0).shuffle(cases)
    cases.sort(key=lambda case: case[1:3] != ("AdamW", "bfloat16") and case[3] != "none")
    for name, optimizer, precision, mode, (size, steps) in cases[: 6 if report.dry else None]:
        if report.seconds_left < 5:
            break
        row = {
            "model": name,
            "optimizer": optimizer,
            "precision": precision,
            "checkpointing": mode,
            "split": [size, steps],
        }
        try:
            report.add(**row, **_memory_row(report, name, optimizer, precision, mode, size, steps))
        except (AutofitError, ImportError) as error:
            report.add(**row, failed=f"{type(error).__name__}: {error}"[:300])
    errors = [abs(row["reserved_ratio"] - 1) for row in report.rows if "reserved_ratio" in row]
    if errors:
        report.summarise(rows_measured=len(errors), median_error=statistics.median(errors), largest_error=max(errors))


def _precisions(report: Report) -> tuple[Precision, ...]:
    return ("float32",) if report.dry else ("float32", "bfloat16")


def _memory_row(
    report: Report, name: str, optimizer: str, precision: Precision, mode: CheckpointingMode, size: int, steps: int
) -> dict[str, Any]:
    model, batch = report.models[name]()
    scale = 1 if report.dry else 8
    checkpointing = Checkpointing.of(dict.fromkeys(discover_blocks(model).names, mode))
    candidate = Candidate(
        micro_batch_size=size * scale, accumulation_steps=steps, precision=precision, checkpointing=checkpointing
    )
    samples = size * scale * steps
    predictor = Predictor(model, batch, device=report.device, optimizer=OPTIMIZERS[optimizer])
    began = time.monotonic()
    predicted = predictor.predict(candidate)
    seconds = time.monotonic() - began
    with _ready(report, model, batch, samples, OPTIMIZERS[optimizer]) as ready:
        reading = measure_need(candidate, ready.setup, available_bytes=ready.info.total_bytes)
    if reading is None:
        return {"failed": "does not fit on the device"}
    return {
        "predicted_reserved_bytes": predicted.peak_reserved_bytes,
        "reserved_bytes": reading.peak_reserved_bytes,
        "reserved_ratio": predicted.peak_reserved_bytes / reading.peak_reserved_bytes,
        "allocated_ratio": predicted.peak_allocated_bytes / reading.peak_allocated_bytes,
        "prediction_seconds": round(seconds, 2),
    }


def _ready(report: Report, model: nn.Module, batch: Any, samples: int, optimizer: Any = None) -> Any:
    return prepared(
        model, batch, samples=samples, optimizer=optimizer, device=report.device, budget=None, loss_options={}
    )


def seconds(report: Report) -> None:
    """The roofline against measured steps: the ratio, and whether the order is the same."""
    gpu = "A100 40GB" if report.dry else _catalogue_name()
    for name in report.models:
        try:
            model, batch = report.models[name]()
        except ImportError as error:
            report.add(model=name, failed=str(error)[:300])
            continue
        predictor = StepPredictor(model, batch, gpu=gpu)
        for precision, size in product(_precisions(report), (2, 4) if report.dry else (8, 64)):
            if report.seconds_left < 5:
                break
            candidate = Candidate(micro_batch_size=size, accumulation_steps=2, precision=precision)
            with _ready(report, model, batch, 2 * size) as ready:
                trial = run_trial(candidate, ready.setup)
            if trial.step_seconds is not None:
                predicted = predictor.step_seconds(candidate, samples=2 * size)
                ratio = predicted / trial.step_seconds.median
                report.add(model=name, precision=precision, micro_batch_size=size, gpu=gpu, seconds_ratio=ratio)
    ratios = [row["seconds_ratio"] for row in report.rows if "seconds_ratio" in row]
    if ratios:
        report.summarise(median_ratio=statistics.median(ratios), lowest=min(ratios), highest=max(ratios))


def _catalogue_name() -> str:
    """The catalogue's name of the device here, or the one of its generation."""
    name = torch.cuda.get_device_name(0).removeprefix("NVIDIA ")
    for candidate in (name, name.split("-")[0], name.split()[0]):
        try:
            return find_gpu(candidate).name
        except AutofitError:
            continue
    return "H100" if torch.cuda.get_device_capability(0) >= (9, 0) else "A100 80GB"


def search(report: Report) -> None:
    """tune() beside a sweep of all splits, and beside doubling until memory runs out, at three budgets."""
    target = 16 if report.dry else 256
    names = [name for name in ("ResNet-50", "ViT-B/16", "GPT-2", "BERT") if name in report.models] or list(
        report.models
    )[:1]
    for share, name in product((0.9,) if report.dry else (0.5, 0.25, 0.12), names):
        if report.seconds_left < 20:
            break
        try:
            report.add(model=name, **_search_row(report, name, target, share))
        except (AutofitError, ImportError) as error:
            report.add(model=name, failed=f"{type(error).__name__}: {error}"[:300])


def _search_row(report: Report, name: str, target: int, share: float) -> dict[str, Any]:
    model, batch = report.models[name]()
    whole = Candidate(micro_batch_size=target, accumulation_steps=1)
    need = Predictor(model, batch, device=report.device).predict(whole).fit_threshold_bytes
    with _ready(report, model, batch, target) as ready:
        outside = ready.allowance.outside_bytes
    budget = outside + int(need * share)
    began = time.monotonic()
    plan = autofit.tune(model, batch, target_batch=target, device=report.device, budget=budget)
    tuning = time.monotonic() - began
    rates = {"autofit": plan.best.samples_per_second or 0.0}
    with prepared(
        model, batch, samples=target, optimizer=None, device=report.device, budget=budget, loss_options={}
    ) as ready:
        swept = list(_sweep(report, ready, target, plan.candidate.precision))
    rates["sweep"] = max((rate for _, rate in swept), default=0.0)
    rates["doubling"] = next(
        (rate for size, rate in sorted(swept, reverse=True) if rate and size & (size - 1) == 0), 0.0
    )
    return {
        "budget_bytes": budget,
        "plan": str(plan.candidate),
        "trials": len(plan.trials),
        "out_of_memory": sum(trial.outcome == "out_of_memory" for trial in plan.trials),
        "tuning_seconds": round(tuning, 1),
        "over_sweep": rates["autofit"] / rates["sweep"] if rates["sweep"] else None,
        "over_doubling": rates["autofit"] / rates["doubling"] if rates["doubling"] else None,
    }


def _sweep(report: Report, ready: Prepared, target: int, precision: Precision) -> Iterator[tuple[int, float]]:
    """Every split without recomputation, largest first, as long as there is time."""
    for size, steps in reversed(autofit.SearchSpace().splits(target)):
        if report.seconds_left < 10:
            return
        candidate = Candidate(micro_batch_size=size, accumulation_steps=steps, precision=precision)
        yield size, run_trial(candidate, ready.setup).samples_per_second or 0.0


def overhead(report: Report) -> None:
    """TrainStep beside the loop written by hand."""
    figures = measure_overhead(20 if report.dry else 200, 2, 64 if report.dry else 512)
    report.add(**figures, overhead=figures["autofit"] - 1)


PARTS: dict[str, Callable[[Report], None]] = {
    "tests": tests,
    "snapshots": allocator_snapshots,
    "memory": memory,
    "seconds": seconds,
    "search": search,
    "overhead": overhead,
}
