"""Plans that are kept: found again for the same request, confirmed first, and never for another one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autofit
import autofit.cache
from autofit.candidate import SearchSpace
from autofit.errors import ConfigError
from autofit.fingerprint import describe_batch, describe_function, describe_model, describe_optimizer, fingerprint
from autofit.plan import Plan, Trial
from tests.models import ConvNet, image_batch, vector_batch
from tests.states import FullState

SPACE = SearchSpace(precision="float32", checkpointing="none", micro_batch_size=[2, 6])


def tune(folder: Path, *, model: nn.Module | None = None, **options: Any) -> tuple[Plan, list[Trial]]:
    """A small tuning with that cache; the plan, and the trials that were run."""
    trials: list[Trial] = []
    arguments: dict[str, Any] = {"target_batch": 6, "budget": "32MiB", "space": SPACE, "device": "cpu"}
    plan = autofit.tune(
        model or ConvNet(), image_batch(), cache=folder, on_trial=trials.append, **{**arguments, **options}
    )
    return plan, trials


@pytest.fixture
def kept(tmp_path: Path) -> Plan:
    """The plan of a first tuning, which is in the cache now."""
    plan, trials = tune(tmp_path)
    assert trials
    return plan


def test_the_same_request_is_not_tuned_twice(tmp_path: Path, kept: Plan) -> None:
    """The plan comes back after one step; no trial is run, and the model is as it was."""
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("ConvNet-")
    assert Plan.load(file) == kept
    model = ConvNet()
    before = FullState(model)
    again, trials = tune(tmp_path, model=model)
    assert trials == []
    assert again.candidate == kept.candidate
    assert again.best.step_seconds == kept.best.step_seconds
    assert "cache" in again.notes[-1]
    assert before.differences(model) == []


@pytest.mark.parametrize(
    "other",
    [
        {"target_batch": 4},
        {"budget": "48MiB"},
        {"model": ConvNet(width=8)},
        {"optimizer": partial(torch.optim.SGD, lr=0.1)},
        {"space": SearchSpace(precision="float32", checkpointing="none", micro_batch_size=[3])},
        {"loss_fn": nn.CrossEntropyLoss(label_smoothing=0.1)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_another_request_is_tuned(tmp_path: Path, kept: Plan, other: dict[str, Any]) -> None:
    """Whatever a plan depends on makes another entry."""
    _, trials = tune(tmp_path, **other)
    assert trials
    assert len(list(tmp_path.iterdir())) == 2


def _broken(text: str) -> str:
    return text[:100]


def _of_other_versions(text: str) -> str:
    return text.replace(f'"torch_version": "{torch.__version__}"', '"torch_version": "0.1"')


def _without_a_best(text: str) -> str:
    return Plan.from_json(text).model_copy(update={"best_number": None}).to_json()


def _of_another_budget(text: str) -> str:
    return Plan.from_json(text).model_copy(update={"budget_bytes": 1 << 20}).to_json()


@pytest.mark.parametrize("change", [_broken, _of_other_versions, _without_a_best, _of_another_budget])
def test_foreign_entries_are_ignored(
    tmp_path: Path, kept: Plan, change: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    """What is no plan for here and now is logged, tuned anew and replaced."""
    (file,) = tmp_path.iterdir()
    file.write_text(change(file.read_text()))
    with caplog.at_level(logging.INFO, logger="autofit"):
        plan, trials = tune(tmp_path)
    assert trials
    assert any("is ignored" in record.message for record in caplog.records)
    assert Plan.load(file) == plan


def test_a_plan_that_does_not_hold_is_tuned_anew(
    tmp_path: Path, kept: Plan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The confirmation runs out of memory: the entry is worth nothing."""

    def fails(trial: Trial, setup: Any) -> Trial:
        return trial.model_copy(update={"outcome": "out_of_memory", "message": "whole step, forward: no memory"})

    monkeypatch.setattr(autofit.cache, "confirm_trial", fails)
    with caplog.at_level(logging.INFO, logger="autofit"):
        _, trials = tune(tmp_path)
    assert trials
    assert any("does not hold any more" in record.message for record in caplog.records)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    """Said before anything runs."""
    file = tmp_path / "plan.json"
    file.write_text("")
    with pytest.raises(ConfigError, match="Pass a folder"):
        tune(file)


def test_a_cache_that_cannot_be_written_costs_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk is a warning."""

    def full(self: Plan, path: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Plan, "save", full)
    plan, _ = tune(tmp_path / "new")
    assert plan.best.feasible
    assert any("not kept" in record.message for record in caplog.records)


class Edited(ConvNet):
    """The same modules, another forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 2)


def test_models_by_structure() -> None:
    """Values do not count; shapes, settings, types, modes, ties and code do."""

    def of(model: nn.Module) -> str:
        return fingerprint({"model": describe_model(model)})

    same = of(ConvNet())
    assert of(ConvNet()) == same
    dropout = ConvNet()
    dropout.blocks[0][3].p = 0.5  # type: ignore[assignment]
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    untied = of(tied)
    tied[1].weight = tied[0].weight
    frozen = ConvNet()
    frozen.stem.requires_grad_(False)
    others = [ConvNet(8), ConvNet().double(), ConvNet().eval(), Edited(), dropout, frozen]
    assert len({same, of(tied), untied, *map(of, others)}) == 3 + len(others)


class _Called:
    """An object that is a function."""

    def __call__(self, x: float) -> float:
        return x


def test_functions_by_code() -> None:
    """Name, code, defaults and plain captured values count."""

    def make(scale: float) -> Callable[[float], float]:
        return lambda x: x * scale

    assert describe_function(make(1.0)) == describe_function(make(1.0))
    assert describe_function(make(1.0)) != describe_function(make(2.0))
    assert describe_function(partial(F.cross_entropy, label_smoothing=0.1)) != describe_function(F.cross_entropy)
    assert describe_function(len) != describe_function(max)  # no Python, no code
    assert describe_function(_Called()) == describe_function(_Called())
    assert describe_function(None) is None
    assert describe_function("sum") == "sum"
    assert describe_function(nn.MSELoss()) != describe_function(nn.L1Loss())


def test_batches_and_optimizers() -> None:
    """Shapes and types of a batch, settings of an optimizer."""
    images, targets = image_batch()
    assert describe_batch((images, targets)) == describe_batch((images + 1, targets))
    assert describe_batch((images, targets)) != describe_batch((images.double(), targets))
    assert describe_batch(vector_batch()) != describe_batch(image_batch())
    parameters = list(ConvNet().parameters())
    adam = describe_optimizer(torch.optim.AdamW(parameters))
    assert describe_optimizer(torch.optim.AdamW(parameters)) == adam
    assert describe_optimizer(torch.optim.AdamW(parameters, foreach=True)) != adam
    assert describe_optimizer(torch.optim.Adam(parameters)) != adam
