"""What tests ask of documents: their code, their commands, their links."""

from __future__ import annotations

import re
import shlex
from typing import Any

import typer

from autofit.cli.app import app


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def run_blocks(text: str, name: str) -> dict[str, Any]:
    """Runs the Python blocks in order in one namespace, as a reader would paste them, and gives it."""
    namespace: dict[str, Any] = {"__name__": name}
    for number, block in enumerate(blocks(text, "python"), start=1):
        exec(compile(block, f"{name}, python block {number}", "exec"), namespace)
    return namespace


def commands(text: str) -> list[str]:
    """Every `python -m autofit …` in a shell block."""
    return [line for block in blocks(text, "sh") for line in re.split(r"\n|&&", block) if "python -m autofit" in line]


def unknown_options(command: str) -> set[str]:
    """The options of a command line that autofit does not have."""
    group: Any = typer.main.get_command(app)
    name = command.split("autofit")[1].split()[0]
    params = group.commands.get(name, group.commands["tune"]).params
    known = {option for parameter in params for option in parameter.opts}
    return {word for word in shlex.split(command) if word.startswith("--")} - known
