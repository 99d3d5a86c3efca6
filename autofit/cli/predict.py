"""`autofit predict`: what would fit on a GPU that is not here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autofit.cli.defaults import ACCELERATOR_BATCH, CheckpointingName, OptimizerName, PrecisionName
from autofit.cli.tune import MEMORY, MODEL, OUTPUT, SEARCH, check_budget, check_out, given


def predict(
    model: Annotated[str, typer.Option(metavar="NAME", rich_help_panel=MODEL, help="As for tune.")],
    gpu: Annotated[
        str, typer.Option(metavar="NAME", rich_help_panel=MEMORY, help='Of the catalogue: "RTX 4090", A10G, H100, …')
    ],
    target_batch: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            rich_help_panel=MODEL,
            help=f"Samples per optimizer step, met exactly. Left out: {ACCELERATOR_BATCH}.",
        ),
    ] = None,
    optimizer: Annotated[
        OptimizerName | None,
        typer.Option(metavar="NAME", case_sensitive=False, rich_help_panel=MODEL, help="Left out: adamw."),
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(metavar="PX", min=1, rich_help_panel=MODEL, help="For models of images.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(metavar="N", min=1, rich_help_panel=MODEL, help="Tokens, for models of text.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            callback=check_budget,
            rich_help_panel=MEMORY,
            help="Memory that the process may use: 8GiB, 400MiB, 0.9, 90%. Left out: all but a small reserve.",
        ),
    ] = None,
    precision: Annotated[
        list[PrecisionName] | None,
        typer.Option(metavar="NAME", case_sensitive=False, rich_help_panel=SEARCH, help="May be used; repeatable."),
    ] = None,
    checkpointing: Annotated[
        list[CheckpointingName] | None,
        typer.Option(metavar="MODE", case_sensitive=False, rich_help_panel=SEARCH, help="May be used; repeatable."),
    ] = None,
    micro_batch_size: Annotated[
        list[int] | None, typer.Option(metavar="N", min=1, rich_help_panel=SEARCH, help="May be used; repeatable.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print the plan as JSON and nothing else.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=check_out, rich_help_panel=OUTPUT, help="Write the plan here, as JSON."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=check_out, rich_help_panel=OUTPUT, help="Write a page of pictures here, as HTML."
        ),
    ] = None,
) -> None:
    """Predicts which ways to train a model fit on a GPU that need not be here.

    Nothing is run: memory comes from the step on tensors without values, the order from a roofline.
    Exit status: 0 a plan, 1 an error, 2 wrong usage, 3 nothing fits.
    """
    from autofit.cli.outlook import run  # here, so that --help need not wait for what they import
    from autofit.cli.run import Output, Request

    request = Request(
        model=model,
        image_size=image_size,
        sequence_length=sequence_length,
        optimizer=optimizer,
        space=given(precision=precision, checkpointing=checkpointing, micro_batch_size=micro_batch_size),
        arguments=given(target_batch=target_batch, budget=budget),
    )
    run(request, Output(as_json=as_json, path=out, report=report), gpu=gpu)
