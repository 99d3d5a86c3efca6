"""`report`, `explain` and `--report`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PLANS = Path(__file__).parents[1] / "report" / "golden"
TINY = ("--model", "squeezenet1_1", "--image-size", "32")


def test_a_saved_plan_becomes_a_page(run: Callable[..., Any], tmp_path: Path) -> None:
    """Beside the plan unless told otherwise; its path goes to stdout."""
    plan = tmp_path / "plan.json"
    plan.write_bytes((PLANS / "cpu.json").read_bytes())
    finished = run("report", str(plan))
    assert (finished.code, finished.out.strip()) == (0, str(tmp_path / "plan.html"))
    assert (tmp_path / "plan.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    other = tmp_path / "other.html"
    assert run("report", str(plan), "--out", str(other)).code == 0
    assert other.exists()


def test_tune_writes_the_page_too(run: Callable[..., Any], fake: Any, tmp_path: Path) -> None:
    """--report, with or without --out."""
    page = tmp_path / "r.html"
    finished = run(*TINY, "--report", str(page))
    assert finished.code == 0, finished.err
    assert "samples per second" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ["report", "explain"])
def test_what_is_no_plan_is_refused(run: Callable[..., Any], tmp_path: Path, command: str) -> None:
    """A file that is no plan is an error, a file that is not there wrong usage."""
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    assert run(command, str(wrong)).code == 1
    assert run(command, str(tmp_path / "missing.json")).code == 2


def test_a_page_that_cannot_be_written_is_an_error(run: Callable[..., Any], tmp_path: Path) -> None:
    """A folder that is not there is wrong usage before anything is done."""
    finished = run("report", str(PLANS / "cpu.json"), "--out", str(tmp_path / "no" / "r.html"))
    assert finished.code == 2


@pytest.mark.parametrize("columns", [40, 80])
def test_a_plan_is_explained_at_the_terminals_width(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """Three sections of wrapped lines."""
    monkeypatch.setenv("COLUMNS", str(columns))
    finished = run("explain", str(PLANS / "cpu.json"))
    assert finished.code == 0
    assert "Why this plan won" in finished.out
    assert max(map(len, finished.out.splitlines())) <= columns
