"""`python -m autofit predict`: what would fit on a GPU that is not here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autofit.plan import Plan

MODEL = """
from tests.models import ConvNet, image_batch


def make():
    return dict(model=ConvNet(), sample_batch=image_batch(), target_batch=32)
"""


@pytest.fixture
def command(folder: Path) -> tuple[str, ...]:
    """The command for a small CNN, in an empty folder."""
    (folder / "small.py").write_text(MODEL)
    return ("predict", "--model", "small.py:make", "--gpu", "RTX 3060", "--precision", "float32")


def test_what_fits_is_printed_and_never_called_measured(run: Callable[..., Any], command: tuple[str, ...]) -> None:
    """A table, best first, and where the memory of the best goes."""
    finished = run(*command)
    assert finished.code == 0, finished.err
    assert "ConvNet on a RTX 3060, predicted: 32 samples per optimizer step, AdamW" in finished.out
    assert "are predicted to fit, best first" in finished.out
    for line in ("weights", "gradients", "optimizer states", "activations", "workspaces", "rounding", "context"):
        assert f"\n  {line} " in finished.out
    assert "measured" not in finished.out


def test_json_and_the_file_are_the_plan(run: Callable[..., Any], command: tuple[str, ...], folder: Path) -> None:
    """One document."""
    finished = run(*command, "--json", "--out", "plan.json", "--target-batch", "8")
    plan = Plan.from_json(finished.out)
    assert plan == Plan.load(folder / "plan.json")
    assert (plan.target_batch, plan.best.outcome) == (8, "predicted")


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--gpu", "RTX 4909"), 1, "RTX 4090"),
        (("--budget", "427MiB"), 3, "Nothing is predicted to fit"),
        (("--budget", "8 apples"), 2, "not a size in bytes"),
    ],
)
def test_exit_codes(
    run: Callable[..., Any], command: tuple[str, ...], options: tuple[str, ...], code: int, said: str
) -> None:
    """1 an error, 2 wrong usage, 3 nothing fits."""
    finished = run(*command, *options)
    assert finished.code == code
    assert said in " ".join(finished.err.replace("│", " ").split())
