"""The Hugging Face Trainer with a plan: its own loop, its own loss."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import autofit
from autofit.candidate import Checkpointing
from autofit.errors import ConfigError, InfeasibleError
from autofit.plan import Plan
from tests.integrations.conftest import FULL, Texts, plan_of, watch_sizes

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

from autofit.integrations.hugging_face import PlanCallback, training_arguments  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def trainer_for(model: Any, texts: Texts, plan: Plan, folder: Path, *callbacks: Any, **changes: Any) -> Any:
    arguments = {
        "max_steps": 12,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        **plan.to_training_arguments(),
        **changes,
    }
    arguments = transformers.TrainingArguments(str(folder), **arguments)
    return transformers.Trainer(model=model, args=arguments, train_dataset=texts, callbacks=list(callbacks))


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("checkpointing", [Checkpointing(), FULL], ids=str)
def test_the_trainer_trains_as_the_plan_says(
    bert: Any, texts: Texts, tmp_path: Path, checkpointing: Checkpointing
) -> None:
    """Micro-batches of the plan's size, its number of accumulation steps, its checkpointing; the loss falls."""
    plan = plan_of(bert, checkpointing=checkpointing)
    trainer = trainer_for(bert, texts, plan, tmp_path, PlanCallback(plan, sample_batch=texts.batch(4)))
    seen = watch_sizes(bert)
    inside = watch_sizes(bert.bert.encoder.layer[0].intermediate)
    trainer.train()
    assert plan.candidate.micro_batch_size == 4
    assert seen[-48:] == [4] * 48  # 12 optimizer steps; before them the check
    assert len(inside) == len(seen) * (1 if checkpointing.mode == "none" else 2)  # recomputed once, and not twice
    assert losses(trainer)[-1] < losses(trainer)[0]
    assert "forward" not in vars(bert.bert.encoder.layer[0])
    assert not bert.is_gradient_checkpointing


def test_checkpointing_without_the_callback(bert: Any, texts: Texts, tmp_path: Path) -> None:
    """The Trainer's own checkpointing is on, so that a plan that needs it does not run out of memory."""
    plan = plan_of(bert, checkpointing=FULL)
    trainer = trainer_for(bert, texts, plan, tmp_path)
    trainer.train()
    assert bert.is_gradient_checkpointing
    assert losses(trainer)[-1] < losses(trainer)[0]


def test_precision_is_the_plan_s(bert: Any, texts: Texts, tmp_path: Path) -> None:
    """bfloat16 autocast inside the Trainer."""
    plan = plan_of(bert, precision="bfloat16")
    dtypes: set[torch.dtype] = set()
    bert.bert.encoder.layer[0].attention.self.query.register_forward_hook(lambda *a: dtypes.add(a[2].dtype))
    trainer = trainer_for(bert, texts, plan, tmp_path, max_steps=2)
    dtypes.clear()
    trainer.train()
    assert dtypes == {torch.bfloat16}


def test_an_uneven_plan_is_refused_with_what_to_do(bert: Any) -> None:
    """16 samples in 3 steps are 6, 5 and 5; an even trial of the same plan is named."""
    plan = plan_of(bert, steps=3)
    with pytest.raises(ConfigError, match=r"micro-batches are of 6 and 5 samples .*even_split=True"):
        plan.to_training_arguments()
    trial = plan.best.model_copy(
        update={
            "number": 7,
            "candidate": plan.candidate.model_copy(update={"micro_batch_size": 4, "accumulation_steps": 4}),
        }
    )
    both = plan.model_copy(update={"trials": (*plan.trials, trial)})
    with pytest.raises(ConfigError, match=r"trial 7, 4 × 4 .* 0% slower"):
        both.to_training_arguments()
    chosen = both.model_copy(update={"best_number": 7}).to_training_arguments()
    assert (chosen["per_device_train_batch_size"], chosen["gradient_accumulation_steps"]) == (4, 4)


def test_even_split_restricts_the_search(bert: Any, texts: Texts) -> None:
    """Every candidate that is tried can be handed to a framework."""
    space = autofit.SearchSpace(even_split=True, precision="float32", checkpointing="none")
    plan = autofit.tune(bert, texts.batch(4), target_batch=12, device="cpu", space=space, max_trials=4)
    assert all(12 % trial.candidate.accumulation_steps == 0 for trial in plan.trials)
    assert plan.to_training_arguments()["per_device_train_batch_size"] == plan.candidate.micro_batch_size


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("float32", {"bf16": False, "fp16": False, "tf32": False}),
        ("tf32", {"bf16": False, "fp16": False, "tf32": True}),
        ("bfloat16", {"bf16": True, "fp16": False}),
        ("float16", {"bf16": False, "fp16": True}),
    ],
)
def test_arguments_of_a_plan_for_cuda(bert: Any, precision: Any, expected: dict[str, bool]) -> None:
    """Without a GPU these can be looked at only."""
    plan = plan_of(bert, precision=precision)
    environment = plan.environment.model_copy(update={"device": "cuda:0"})
    found = training_arguments(plan.model_copy(update={"environment": environment}))
    assert {name: found[name] for name in ("bf16", "fp16", "tf32") if name in found} == expected
    assert found["use_cpu"] is False


def test_the_callback_says_what_differs(
    bert: Any, texts: Texts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Arguments that were changed by hand are a warning; a plan that does not fit stops before the first step."""
    plan = plan_of(bert)
    trainer = trainer_for(bert, texts, plan, tmp_path, PlanCallback(plan), max_steps=1, gradient_accumulation_steps=2)
    with caplog.at_level(logging.WARNING, logger="autofit"):
        trainer.train()
    assert "gradient_accumulation_steps is 2, the plan was made for 4" in caplog.text
    small = plan.model_copy(update={"budget_bytes": 2**20, "cap_bytes": 2**20})
    callback = PlanCallback(small, sample_batch=texts.batch(4))
    seen = watch_sizes(bert)
    with pytest.raises(InfeasibleError, match="does not fit here any more"):
        trainer_for(bert, texts, plan, tmp_path, callback).train()
    assert callback.check.holds is False
    assert len(seen) <= 2
