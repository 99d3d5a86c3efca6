"""`plan.plot`: pictures as a file, and what it says where it cannot."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from autofit.errors import ConfigError
from autofit.report.figures import figures
from autofit.report.plot import COLOURS
from tests.report.plans import NAMES, load, seen

SIGNATURES = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}


@pytest.mark.parametrize("ending", SIGNATURES)
def test_the_ending_names_the_kind(tmp_path: Path, ending: str) -> None:
    """PNG, PDF and SVG begin as such files do."""
    path = tmp_path / f"plan{ending}"
    seen().plot(path)
    assert path.read_bytes().startswith(SIGNATURES[ending])


@pytest.mark.parametrize("name", NAMES)
def test_every_plan_can_be_plotted(tmp_path: Path, name: str) -> None:
    """Whatever a plan lacks; with dollars in its names too, which matplotlib takes for formulas."""
    plan = load(name)
    path = tmp_path / "plan.png"
    plan.plot(str(path))
    assert path.stat().st_size > 10_000


def test_every_role_has_a_colour() -> None:
    """Whatever a figure marks, both painters know it."""
    roles = {
        item.role
        for figure in figures(seen())
        for items in (figure.areas, figure.bars, figure.lines, figure.marks)
        for item in items
    }
    assert len(roles) > 8
    assert roles <= set(COLOURS)


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    """An ending that is unknown, a folder that is not there."""
    with pytest.raises(ConfigError, match=r"its ending must be one of .*png"):
        seen().plot(tmp_path / "plan.docx")
    with pytest.raises(ConfigError, match="No such file"):
        seen().plot(tmp_path / "missing" / "plan.png")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message says what to install."""
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"torch-autofit\[plot\]"):
        seen().plot(tmp_path / "plan.png")
