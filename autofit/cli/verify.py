"""Loads the plan and the model, checks one on the other, and prints what came of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import typer

from autofit.cli.defaults import OptimizerName
from autofit.cli.models import load_workload
from autofit.cli.ranks import is_silent, process_group
from autofit.cli.run import Request, merged_arguments, named_optimizer
from autofit.plan import Plan
from autofit.preflight import PlanCheck
from autofit.units import format_bytes, format_seconds

_OF_THE_CHECK = ("optimizer", "device", "budget", "loss_fn", "compute_loss", "loss_weight", "batch_dims")


def run(request: Request, path: Path, *, as_json: bool) -> bool:
    """Prints whether the plan holds, and gives it."""
    own_prints = contextlib.redirect_stdout(sys.stderr)  # what the user's own code prints
    with own_prints, process_group(request.arguments.get("device")):
        plan = Plan.load(path)
        result = _check(request, plan)
    if is_silent():
        return result.holds
    if as_json:
        typer.echo(f"{result.model_dump_json(indent=2)}\n".encode(), nl=False)
    else:
        typer.echo("\n".join(_lines(plan, result)))
    return result.holds


def _check(request: Request, plan: Plan) -> PlanCheck:
    torch.manual_seed(plan.environment.seed)
    workload = load_workload(request.model, image_size=request.image_size, sequence_length=request.sequence_length)
    arguments = merged_arguments(request, workload)
    if "budget" not in request.arguments:
        arguments.pop("budget", None)  # the factory's was resolved when the plan was made; the plan says to what
    known = {name.name: name for name in OptimizerName}
    if "optimizer" not in arguments and plan.environment.optimizer in known:
        arguments["optimizer"] = named_optimizer(known[plan.environment.optimizer])
    options = {name: arguments[name] for name in _OF_THE_CHECK if name in arguments}
    return plan.check(workload.model, workload.sample_batch, **options)


def _lines(plan: Plan, result: PlanCheck) -> Iterator[str]:
    trial, environment = result.trial, plan.environment
    verdict = "holds" if result.holds else "does not fit"
    yield f"The plan {verdict}: {environment.model}, {plan.target_batch} samples per optimizer step, {trial.candidate}"
    peak = format_bytes(trial.peak_reserved_bytes) if trial.peak_reserved_bytes is not None else "unknown"
    reached = "Peak" if trial.outcome != "out_of_memory" else "Ran out of memory at"
    before = plan.best.peak_reserved_bytes
    planned = f", {format_bytes(before)} when it was made" if before is not None else ""
    yield f"{reached} {peak}{planned}; the cap here is {format_bytes(result.cap_bytes)}"
    if trial.message:
        yield trial.message
    part = "the whole step" if result.whole_step else "its largest micro-batch"
    yield f"Checked {part} in {format_seconds(result.seconds)}"
    yield from (f"Differs: {difference}" for difference in result.differences)
