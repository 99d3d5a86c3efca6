"""The command line: `python -m autofit --model resnet18`."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from autofit.cli.check import check
from autofit.cli.predict import predict
from autofit.cli.ranks import is_silent
from autofit.cli.report import explain, report
from autofit.cli.tune import tune
from autofit.errors import AutofitError, InfeasibleError, RankLostError

EXIT_ERROR = 1
EXIT_NOTHING_FITS = 3
DEFAULT_COMMAND = "tune"


class DefaultCommandGroup(TyperGroup):
    """A group whose options, given without a command, are those of `tune`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0].startswith("-"):
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=DefaultCommandGroup, add_completion=False, pretty_exceptions_enable=False)
app.command(DEFAULT_COMMAND)(tune)
app.command("predict")(predict)
app.command("check")(check)
app.command("report")(report)
app.command("explain")(explain)


@app.callback()
def _commands() -> None:
    """Finds the fastest way to train a PyTorch model that fits into memory."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0 with a plan, 1 on an error, 2 on wrong usage, 3 when nothing fits.

    For `check`, 0 means that the plan holds and 3 that it does not fit.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × or µ shows a question mark and goes on
    try:
        app(args=arguments)
    except AutofitError as error:
        if not is_silent() or isinstance(error, RankLostError):
            typer.echo(f"autofit: {error}", err=True)
        sys.exit(EXIT_NOTHING_FITS if isinstance(error, InfeasibleError) else EXIT_ERROR)
