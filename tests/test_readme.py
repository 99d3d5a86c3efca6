"""The README is true: its code runs, its commands parse, its files exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from autofit.cli.app import app
from autofit.plan import Plan

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_python_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One namespace, as a reader would paste them; the plan that is left is a real one."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "readme"}
    for number, block in enumerate(blocks("python"), start=1):
        exec(compile(block, f"README.md, python block {number}", "exec"), namespace)
    assert Plan.load("plan.json").target_batch == 512
    assert namespace["result"].loss.isfinite()


def test_commands_name_options_that_exist() -> None:
    """Every `python -m autofit …` in a shell block parses as far as its options go."""
    commands = [line for block in blocks("sh") for line in re.split(r"\n|&&", block) if "python -m autofit" in line]
    group: Any = typer.main.get_command(app)
    assert len(commands) >= 4
    for command in commands:
        name = command.split("autofit")[1].split()[0]
        params = group.commands.get(name, group.commands["tune"]).params
        known = {option for parameter in params for option in parameter.opts}
        used = {word for word in shlex.split(command) if word.startswith("--")}
        assert used
        assert used <= known, command


def test_files_that_are_named_exist() -> None:
    """Paths in backticks lead somewhere."""
    named = re.findall(r"`((?:autofit|examples|tests)/[\w/.]+)`", README)
    assert len(named) > 8
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_code_comes_early() -> None:
    """A reader sees code before line 30."""
    assert README.splitlines().index("```python") < 30
