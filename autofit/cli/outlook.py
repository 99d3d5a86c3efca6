"""Loads the model, forecasts it on a GPU of the catalogue, and prints what would fit."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
import typer
from rich.console import Console

from autofit.cli.defaults import ACCELERATOR_BATCH, SEED
from autofit.cli.models import load_workload
from autofit.cli.pages import write_page
from autofit.cli.progress import waiting
from autofit.cli.run import Output, Request, merged_arguments, save
from autofit.errors import InfeasibleError
from autofit.forecaster import Forecaster
from autofit.plan import Plan
from autofit.predict import MemoryPrediction
from autofit.report.text import report_text, trial_line
from autofit.units import format_bytes

SHOWN = 10
_OF_THE_STEP = ("optimizer", "loss_fn", "compute_loss", "loss_weight", "batch_dims")
_OF_THE_PLAN = ("budget", "space")


def run(request: Request, output: Output, *, gpu: str) -> None:
    """Forecasts and prints the plan; where nothing fits, what each would need is printed before the error goes on."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the user's own code prints
            console = Console(stderr=True, highlight=False, markup=False, emoji=False)
            with waiting(console, f"predicting {request.model} on {gpu}, without running it"):
                plan, memory = _forecast(request, gpu)
    except InfeasibleError as error:
        if error.plan is not None:
            typer.echo(error.plan.to_json() if output.as_json else report_text(error.plan), nl=False)
        raise
    if output.path is not None:
        save(plan, output.path)
    if output.report is not None:
        write_page(plan, output.report)
    if output.as_json:
        typer.echo(plan.to_json().encode(), nl=False)
    else:
        typer.echo("\n".join(_lines(plan, memory)))


def _forecast(request: Request, gpu: str) -> tuple[Plan, MemoryPrediction]:
    torch.manual_seed(SEED)
    workload = load_workload(request.model, image_size=request.image_size, sequence_length=request.sequence_length)
    arguments = merged_arguments(request, workload)
    step = {name: arguments[name] for name in _OF_THE_STEP if name in arguments}
    forecaster = Forecaster(workload.model, workload.sample_batch, gpu=gpu, **step)
    plan = forecaster.plan(
        target_batch=arguments.get("target_batch", ACCELERATOR_BATCH),
        **{name: arguments[name] for name in _OF_THE_PLAN if name in arguments},
    )
    return plan, forecaster.memory(plan)


def _lines(plan: Plan, memory: MemoryPrediction) -> Iterator[str]:
    fitting = [trial for trial in plan.trials if trial.outcome == "predicted"]
    environment = plan.environment
    yield (
        f"{environment.model} on a {environment.device_name}, predicted: {plan.target_batch} samples per optimizer "
        f"step, {environment.optimizer}"
    )
    yield f"{len(fitting)} ways are predicted to fit, best first (~ predicted):"
    yield from (trial_line(trial) for trial in fitting[:SHOWN])
    if len(fitting) > SHOWN:
        yield f"and {len(fitting) - SHOWN} more"
    yield ""
    yield f"Memory of number {plan.best.number}, predicted, when most of it is in use ({memory.phase}):"
    for name, count in (*memory.breakdown.model_dump().items(), ("context", memory.context_bytes)):
        yield f"  {name.replace('_', ' '):<17}{format_bytes(count):>10}"
    yield ""
    yield from (f"Note: {note}" for note in plan.notes)
