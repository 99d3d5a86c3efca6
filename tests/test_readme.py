"""The README is true: its code runs, its commands parse, its files exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from autofit.plan import Plan
from tests.documents import commands, run_blocks, unknown_options

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One namespace, as a reader would paste them; the plan that is left is a real one."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = run_blocks(README, "README.md")
    assert Plan.load("plan.json").target_batch == 512
    assert namespace["result"].loss.isfinite()


def test_commands_name_options_that_exist() -> None:
    """Every `python -m autofit …` in a shell block parses as far as its options go."""
    found = commands(README)
    assert len(found) >= 4
    assert {command: unknown for command in found if (unknown := unknown_options(command))} == {}


def test_files_that_are_named_exist() -> None:
    """Paths in backticks lead somewhere."""
    named = re.findall(r"`((?:autofit|examples|tests|docs)/[\w/.]+)`", README)
    assert len(named) > 8
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_code_comes_early() -> None:
    """A reader sees code before line 30."""
    assert README.splitlines().index("```python") < 30
