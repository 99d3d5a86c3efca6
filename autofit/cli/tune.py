"""`autofit tune`, the default command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from autofit._version import __version__
from autofit.cli.defaults import ACCELERATOR_BATCH, CPU_BATCH, CheckpointingName, OptimizerName, PrecisionName
from autofit.errors import ConfigError
from autofit.units import parse_budget

MODEL, MEMORY, SEARCH, OUTPUT = "What to train", "Memory", "What to try", "Output"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autofit {__version__}")
        raise typer.Exit


def check_budget(budget: str | None) -> str | None:
    """Refuses what is no size."""
    if budget is not None:
        try:
            parse_budget(budget, total_bytes=sys.maxsize)  # the form; what the device has is checked when it is known
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from None
    return budget


def check_out(out: Path | None) -> Path | None:
    """Refuses a path that no file can be written to."""
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise typer.BadParameter(f"{out} is not a file in an existing folder.")
    return out


def tune(
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            rich_help_panel=MODEL,
            help="A torchvision name (resnet18), timm:NAME, hf:NAME (model type, local folder or hub id), "
            "package.module:FACTORY or file.py:FACTORY. Random weights and a generated batch.",
        ),
    ],
    target_batch: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            rich_help_panel=MODEL,
            help="Samples per optimizer step, met exactly. "
            f"Left out: {ACCELERATOR_BATCH} on an accelerator, {CPU_BATCH} on the CPU.",
        ),
    ] = None,
    optimizer: Annotated[
        OptimizerName | None,
        typer.Option(
            metavar="NAME",
            case_sensitive=False,
            rich_help_panel=MODEL,
            help=f"{', '.join(OptimizerName)}. Left out: adamw. sgd has momentum 0.9, which costs memory.",
        ),
    ] = None,
    image_size: Annotated[
        int | None,
        typer.Option(
            metavar="PX", min=1, rich_help_panel=MODEL, help="For models of images. Left out: what it was made for."
        ),
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, rich_help_panel=MODEL, help="Tokens, for models of text. Left out: 128."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=MEMORY,
            help="cpu, cuda, cuda:1, … Left out: the accelerator, if there is one.",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            callback=check_budget,
            rich_help_panel=MEMORY,
            help="Memory that this process may use on the device: 8GiB, 400MiB, 0.9, 90%. Left out: what is free.",
        ),
    ] = None,
    precision: Annotated[
        list[PrecisionName] | None,
        typer.Option(
            metavar="NAME",
            case_sensitive=False,
            rich_help_panel=SEARCH,
            help=f"May be used: {', '.join(PrecisionName)}. Repeat for several. Left out: what suits the device.",
        ),
    ] = None,
    checkpointing: Annotated[
        list[CheckpointingName] | None,
        typer.Option(
            metavar="MODE",
            case_sensitive=False,
            rich_help_panel=SEARCH,
            help="Activation checkpointing that may be used: none, full. Repeat for both. Left out: both.",
        ),
    ] = None,
    micro_batch_size: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N", min=1, rich_help_panel=SEARCH, help="May be used. Repeat for several. Left out: any."
        ),
    ] = None,
    even_split: Annotated[
        bool | None,
        typer.Option(
            "--even-split", rich_help_panel=SEARCH, help="Only micro-batches of one size, as the HF Trainer needs them."
        ),
    ] = None,
    max_trials: Annotated[
        int | None, typer.Option(metavar="N", min=1, rich_help_panel=SEARCH, help="Stop after so many trials.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, rich_help_panel=SEARCH, help="Stop when so much time has passed."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N", rich_help_panel=SEARCH, help="Of the weights, the batch and the search. Left out: 0."
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            rich_help_panel=SEARCH,
            help="Optuna storage, such as sqlite:///study.db: a stopped run continues where it was.",
        ),
    ] = None,
    study_name: Annotated[
        str | None, typer.Option(metavar="NAME", rich_help_panel=SEARCH, help="Of the study in the storage.")
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            file_okay=False,
            rich_help_panel=SEARCH,
            help="Keep plans here: the same request gets its plan back after one step that confirms it.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print the plan as JSON and nothing else.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=check_out, rich_help_panel=OUTPUT, help="Write the plan to this file, as JSON."
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=check_out, rich_help_panel=OUTPUT, help="Write a page of pictures here, as HTML."
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Finds the fastest way to train a model at a batch size inside the memory there is.

    Tries real training steps: micro-batch, accumulation, precision, checkpointing.
    The plan goes to stdout, progress to stderr.
    Exit status: 0 a plan, 1 an error, 2 wrong usage, 3 nothing fits.
    """
    from autofit.cli.run import Output, Request, run  # here, so that --help need not wait for what it imports

    request = Request(
        model=model,
        image_size=image_size,
        sequence_length=sequence_length,
        optimizer=optimizer,
        space=given(
            precision=precision,
            checkpointing=checkpointing,
            micro_batch_size=micro_batch_size,
            even_split=even_split,
        ),
        arguments=given(
            target_batch=target_batch,
            budget=budget,
            device=device,
            max_trials=max_trials,
            timeout=timeout,
            seed=seed,
            storage=storage,
            study_name=study_name,
            cache=cache,
        ),
    )
    run(request, Output(as_json=as_json, path=out, report=report))


def given(**options: Any) -> dict[str, Any]:
    """The options that were given; the rest is left to `tune`'s own defaults, or to the user's factory."""
    return {name: value for name, value in options.items() if value is not None}
