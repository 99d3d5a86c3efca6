"""`python -m autofit check`: exit 0 when the plan holds, 3 when it does not fit, 1 when it is for something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODEL = """
import torch
from torch import nn


def make(width=8):
    print("building")
    batch = (torch.randn(4, 16), torch.randint(3, (4,)))
    model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 3))
    return {"model": model, "sample_batch": batch, "target_batch": 8, "max_trials": 1, "budget": 0.5}


def wider():
    return make(width=16)
"""


@pytest.fixture
def command(folder: Path, run: Callable[..., Any]) -> tuple[str, ...]:
    """The check of a plan that was made a moment ago."""
    (folder / "small.py").write_text(MODEL, encoding="utf-8")
    tuned = run("--model", "small.py:make", "--device", "cpu", "--optimizer", "sgd", "--out", "plan.json")
    assert tuned.code == 0, tuned.err
    return ("check", "plan.json", "--model", "small.py:make")


def test_a_plan_that_holds(run: Callable[..., Any], command: tuple[str, ...]) -> None:
    """Exit 0; the budget and the optimizer are the plan's, so nothing differs."""
    finished = run(*command)
    assert finished.code == 0, finished.err
    first, peak, checked = finished.out.splitlines()
    assert first.startswith("The plan holds: Sequential, 8 samples per optimizer step, ")
    assert peak.startswith("Peak 2.0 MiB, 2.0 MiB when it was made; the cap here is ")
    assert checked.startswith("Checked the whole step in ")


def test_a_plan_that_does_not_fit(run: Callable[..., Any], command: tuple[str, ...]) -> None:
    """Exit 3, with where it ran out and what differs."""
    finished = run(*command, "--budget", "1MiB")
    assert finished.code == 3
    assert finished.out.startswith("The plan does not fit: ")
    assert "out of memory" in finished.out
    assert "Differs: budget: plan has " in finished.out


def test_json_is_one_document(run: Callable[..., Any], command: tuple[str, ...]) -> None:
    """What the factory prints goes to stderr."""
    finished = run(*command, "--json", "--optimizer", "adamw")
    assert finished.code == 0, finished.err
    document = json.loads(finished.out)
    assert document["holds"] is True
    assert document["trial"]["outcome"] == "feasible"
    assert document["differences"] == ["optimizer: plan has SGD, here is AdamW"]


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("plan.json", "--model", "small.py:wider"), 1, "parameters: plan has"),
        (("absent.json", "--model", "small.py:make"), 2, "absent.json"),
        (("small.py", "--model", "small.py:make"), 1, "The plan is not valid"),
    ],
)
def test_exit_codes(
    run: Callable[..., Any], command: tuple[str, ...], options: tuple[str, ...], code: int, said: str
) -> None:
    """1 an error, 2 wrong usage."""
    finished = run("check", *options)
    assert finished.code == code
    assert said in " ".join(finished.err.replace("│", " ").split())
