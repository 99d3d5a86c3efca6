"""The documentation is true: its code runs, its commands parse, its links lead somewhere, and it builds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import autofit
from tests.documents import blocks, commands, run_blocks, unknown_options
from tests.test_architecture import LAYERS

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "pages").glob("*.md"))
WITH_CODE = [page for page in PAGES if blocks(page.read_text(encoding="utf-8"), "python")]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_python_blocks_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One namespace for each page."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = run_blocks(page.read_text(encoding="utf-8"), page.name)
    assert namespace["plan"].best.feasible


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_names_exist(page: Path) -> None:
    """Options, files in backticks, and arguments of the search space."""
    text = page.read_text(encoding="utf-8")
    assert {command: unknown for command in commands(text) if (unknown := unknown_options(command))} == {}
    named = re.findall(r"`((?:autofit|examples|tests|docs|benchmarks)/[\w/.]+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
    fields = re.findall(r"SearchSpace\((\w+)=", text)
    assert set(fields) <= set(autofit.SearchSpace.model_fields)


def test_there_are_commands_to_check() -> None:
    """The check above is not empty."""
    assert sum(len(commands(page.read_text(encoding="utf-8"))) for page in PAGES) >= 8


def test_links_inside_lead_somewhere() -> None:
    """Relative links name pages that exist; others are whole addresses."""
    links = [
        (page, link)
        for page in PAGES
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
        if not link.startswith("https://")
    ]
    assert len(links) >= 5
    assert [link for page, link in links if not (page.parent / link.partition("#")[0]).exists()] == []


def test_the_layer_map_is_the_packages() -> None:
    """Every part that the map names exists, and the layers come from the top down."""
    text = (ROOT / "docs" / "pages" / "how-it-works.md").read_text(encoding="utf-8")
    rows = text.split("## The layers")[1].split("\n| ")[2:]
    layers = [[LAYERS[name] for name in re.findall(r"`(\w+)`", row.splitlines()[0])] for row in rows]
    assert len(layers) >= 9
    highest = [max(row) for row in layers]
    assert highest == sorted(highest, reverse=True)


def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    """A page that is missing from the map, or a dead link or anchor, fails the build."""
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", str(ROOT / "docs" / "mkdocs.yml")]
    built = subprocess.run([*command, "-d", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r"<(?:script|img)[^>]*src=\"https?:", page)
