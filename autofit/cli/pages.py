"""Writes reports and wraps explanations for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from autofit.errors import ConfigError
from autofit.plan import Plan
from autofit.report.explain import explain
from autofit.report.html import html_report
from autofit.report.text import headline

WIDEST = 100


def write_page(plan: Plan, path: Path) -> None:
    """Writes the plan's HTML report; raises ConfigError where that fails."""
    try:
        path.write_text(html_report(plan), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The report cannot be written to {path}: {error.strerror}.") from error


def wrapped(plan: Plan) -> str:
    """The explanation at the terminal's width, 80 columns in a pipe."""
    return "\n".join(_lines(plan, min(Console().width, WIDEST)))


def _lines(plan: Plan, width: int) -> Iterator[str]:
    yield from textwrap.wrap(headline(plan), width)
    for section in explain(plan):
        yield ""
        yield section.title
        for line in section.lines:
            yield from textwrap.wrap(line, width, initial_indent="  * ", subsequent_indent="    ")
