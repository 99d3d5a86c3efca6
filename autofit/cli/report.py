"""`autofit report` and `autofit explain`: a saved plan as a page of pictures, and in plain words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autofit.cli.tune import OUTPUT, check_out

PLAN = typer.Argument(metavar="PLAN", exists=True, dir_okay=False, help="A plan saved with --out.")


def report(
    plan: Annotated[Path, PLAN],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=check_out, rich_help_panel=OUTPUT, help="Left out: beside the plan, as .html."
        ),
    ] = None,
) -> None:
    """Writes a saved plan as one HTML page: pictures, tables, the recipe. It needs no network, no model and no GPU.

    Prints the page's path. Exit status: 0 written, 1 an error, 2 wrong usage.
    """
    from autofit.cli.pages import write_page  # here, so that --help need not wait for what it imports
    from autofit.plan import Plan

    page = out or plan.with_suffix(".html")
    write_page(Plan.load(plan), page)
    typer.echo(str(page))


def explain(plan: Annotated[Path, PLAN]) -> None:
    """Says in plain words what takes the memory, what each technique would save and cost, and why this plan won."""
    from autofit.cli.pages import wrapped
    from autofit.plan import Plan

    typer.echo(wrapped(Plan.load(plan)))
