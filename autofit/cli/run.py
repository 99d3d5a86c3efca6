"""Loads the model, tunes it, and hands the plan out."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import typer
from rich.console import Console

import autofit
from autofit.candidate import SearchSpace
from autofit.cli.defaults import ACCELERATOR_BATCH, CPU_BATCH, SEED, OptimizerName
from autofit.cli.models import Workload, load_workload
from autofit.cli.pages import write_page
from autofit.cli.progress import TrialProgress, say
from autofit.cli.ranks import is_silent, process_group
from autofit.device import resolve_device
from autofit.distributed import world_size
from autofit.errors import ConfigError, DeviceLostError, InfeasibleError, StorageError
from autofit.plan import Plan, Trial, best_trial
from autofit.report.text import report, report_text
from autofit.units import format_bytes

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass(frozen=True)
class Request:
    """What was asked on the command line; options that were left out are not in the mappings."""

    model: str
    image_size: int | None
    sequence_length: int | None
    optimizer: OptimizerName | None
    space: Mapping[str, Any]
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Output:
    """Where the plan goes besides a person's eyes."""

    as_json: bool
    path: Path | None
    report: Path | None = None


def run(request: Request, output: Output) -> None:
    """Tunes and prints the plan; a plan that came with an error is printed too before the error goes on."""
    try:
        # What the user's own code prints must not get between the lines of the JSON document.
        with contextlib.redirect_stdout(sys.stderr), process_group(request.arguments.get("device")):
            plan = _tune(request)
    except (InfeasibleError, DeviceLostError, StorageError) as error:
        if error.plan is not None:
            _deliver(error.plan, output)
        raise
    _deliver(plan, output)


def _tune(request: Request) -> Plan:
    console = Console(stderr=True, highlight=False, markup=False, emoji=False, quiet=is_silent())
    torch.manual_seed(request.arguments.get("seed", SEED))
    where, _, factory = request.model.rpartition(":")
    if where.endswith(".py"):
        say(console, f"autofit: running factory {factory} from {where}")
    workload = load_workload(request.model, image_size=request.image_size, sequence_length=request.sequence_length)
    arguments = merged_arguments(request, workload)
    device = arguments["device"] = resolve_device(arguments.get("device"), workload.model)
    notes = []
    if "target_batch" not in arguments:
        arguments["target_batch"] = CPU_BATCH if device.type == "cpu" else ACCELERATOR_BATCH
        where = "the CPU" if device.type == "cpu" else "an accelerator"
        notes.append(f"--target-batch was left out: {arguments['target_batch']}, the default on {where}.")
    ranks = f" over {world_size()} ranks" if world_size() > 1 else ""
    say(
        console,
        f"autofit: {request.model} ({workload.description}) on {device}, "
        f"{arguments['target_batch']} samples per optimizer step{ranks}",
    )
    bounds = {name: arguments.get(name) for name in ("max_trials", "timeout")}
    shown = TrialProgress(console, **bounds)
    try:
        with shown:
            plan = autofit.tune(
                workload.model,
                workload.sample_batch,
                on_trial=shown.on_trial,
                on_progress=shown.on_progress,
                **arguments,
            )
    except KeyboardInterrupt:
        say(console, _interrupted(shown.trials))
        raise
    return plan.model_copy(update={"notes": (*plan.notes, *notes)})


def _interrupted(trials: Sequence[Trial]) -> str:
    best = best_trial(trials)
    if best is None:
        return f"autofit: interrupted after {len(trials)} trials, of which none fits"
    rate, peak = best.samples_per_second or 0.0, format_bytes(best.peak_reserved_bytes or 0)
    return (
        f"autofit: interrupted after {len(trials)} trials; the fastest so far: {best.candidate}, {rate:.3g} samples/s "
        f"at {peak}. With --storage the same command goes on from here."
    )


def merged_arguments(request: Request, workload: Workload) -> dict[str, Any]:
    """`tune`'s arguments: those of the user's factory, and over them those of the command line."""
    arguments = {"seed": SEED, **workload.arguments, **request.arguments}
    if request.optimizer is not None:
        arguments["optimizer"] = named_optimizer(request.optimizer)
    if request.space:
        base = arguments.get("space")
        arguments["space"] = SearchSpace(**{**(dict(base) if isinstance(base, SearchSpace) else {}), **request.space})
    return arguments


def named_optimizer(name: OptimizerName) -> Callable[[Iterable[Any]], Optimizer]:
    """The optimizer of that name as the command line makes it."""
    optimizer = getattr(torch.optim, name.name)
    momentum = {"momentum": 0.9} if name is OptimizerName.SGD else {}
    return partial(optimizer, lr=1e-3, **momentum)


def _deliver(plan: Plan, output: Output) -> None:
    """Saves the plan if it can be trained with, and prints it even where saving fails; of several ranks, the first."""
    if is_silent():
        return
    try:
        if output.path is not None and plan.best_number is not None:
            save(plan, output.path)
        if output.report is not None:
            write_page(plan, output.report)
    finally:
        _print(plan, output)


def _print(plan: Plan, output: Output) -> None:
    path = None if output.path is None else str(output.path)
    console = Console(highlight=False, markup=False, emoji=False)
    if output.as_json:
        typer.echo(plan.to_json().encode(), nl=False)  # bytes: JSON is UTF-8 whatever the terminal speaks
    elif console.is_terminal:
        console.print(report(plan, plan_path=path))
    else:
        typer.echo(report_text(plan, plan_path=path, width=console.width), nl=False)


def save(plan: Plan, path: Path) -> None:
    """Writes the plan; raises ConfigError where that fails."""
    try:
        plan.save(path)
    except OSError as error:
        raise ConfigError(f"The plan cannot be written to {path}: {error.strerror}.") from error
