"""The command line with the real tune(), on a model of a few kilobytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna

from autofit.plan import Plan

FACTORY = """
import torch
from torch import nn

def build():
    print("building")
    batch = (torch.randn(4, 16), torch.randint(3, (4,)))
    return {"model": nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)), "sample_batch": batch}
"""


def command(folder: Path, *options: str) -> list[str]:
    """The arguments that tune the factory's model with few trials."""
    (folder / "tiny.py").write_text(FACTORY, encoding="utf-8")
    return ["--model", "tiny.py:build", "--device", "cpu", "--target-batch", "8", "--max-trials", "2", *options]


def test_a_plan_is_found_printed_and_saved(folder: Path, run: Callable[..., Any]) -> None:
    """Exit 0; the JSON on stdout is the file, and its best trial is feasible within the budget."""
    finished = run(*command(folder, "--json", "--out", "plan.json", "--budget", "1GiB", "--optimizer", "sgd"))
    assert finished.code == 0, finished.err
    plan = Plan.from_json(finished.out)
    assert plan == Plan.load("plan.json")
    assert plan.best.feasible
    assert plan.best.peak_reserved_bytes is not None
    assert plan.best.peak_reserved_bytes <= plan.cap_bytes <= plan.budget_bytes == 2**30
    assert plan.environment.optimizer == "SGD"
    assert "building" in finished.err


def test_the_report_states_what_was_measured(folder: Path, run: Callable[..., Any]) -> None:
    """The best trial's row, and where the memory figures come from."""
    finished = run(*command(folder))
    assert finished.code == 0, finished.err
    assert any(line.startswith("* ") and line.endswith("feasible") for line in finished.out.splitlines())
    assert "Memory was tracked" in finished.out


def test_exit_3_when_nothing_fits(folder: Path, run: Callable[..., Any]) -> None:
    """The allocator's smallest segment is 2 MiB, so a budget of 1 MiB holds no tensor."""
    finished = run(*command(folder, "--budget", "1MiB", "--json"))
    assert finished.code == 3
    assert json.loads(finished.out)["best_number"] is None
    assert "autofit: Nothing fits" in finished.err


def test_a_stopped_study_continues(folder: Path, run: Callable[..., Any]) -> None:
    """With a storage the trials of the first run are not run again; only the finals are held anew."""
    study = {"storage": "sqlite:///study.db", "study_name": "tiny"}
    storage = ("--storage", study["storage"], "--study-name", study["study_name"], "--json", "--budget", "1GiB")
    first = run(*command(folder, *storage))
    tried = len(optuna.load_study(**study).trials)
    second = run(*command(folder, *storage))
    assert (first.code, second.code) == (0, 0), second.err
    before, after = (
        {trial.number: trial.candidate for trial in Plan.from_json(finished.out).trials} for finished in (first, second)
    )
    assert before == after
    assert len(optuna.load_study(**study).trials) == tried
