"""`autofit check`: a pipeline's pre-flight."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autofit.cli.defaults import OptimizerName
from autofit.cli.tune import MEMORY, MODEL, OUTPUT, check_budget, given


def check(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", exists=True, dir_okay=False, help="A plan saved with --out.")],
    model: Annotated[str, typer.Option(metavar="NAME", rich_help_panel=MODEL, help="As for tune.")],
    optimizer: Annotated[
        OptimizerName | None,
        typer.Option(metavar="NAME", case_sensitive=False, rich_help_panel=MODEL, help="Left out: the plan's."),
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(metavar="PX", min=1, rich_help_panel=MODEL, help="For models of images.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(metavar="N", min=1, rich_help_panel=MODEL, help="Tokens, for models of text.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", rich_help_panel=MEMORY, help="Left out: one of the plan's kind.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", callback=check_budget, rich_help_panel=MEMORY, help="Left out: the plan's."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print the result as JSON and nothing else.")
    ] = False,
) -> None:
    """Runs a saved plan's training step here, at full size under its budget: does the plan still hold?

    Says by name what differs from where the plan was made.
    Exit status: 0 it holds, 1 an error (also a plan for another model or kind of device), 2 wrong usage, 3 it does not
    fit.
    """
    from autofit.cli.run import Request  # here, so that --help need not wait for what they import
    from autofit.cli.verify import run

    request = Request(
        model=model,
        image_size=image_size,
        sequence_length=sequence_length,
        optimizer=optimizer,
        space={},
        arguments=given(budget=budget, device=device),
    )
    if not run(request, plan, as_json=as_json):
        raise typer.Exit(3)
