"""Accelerate: a loop with `accumulate`, and the plan's own step on what `prepare` returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from autofit.errors import ConfigError
from autofit.plan import Plan
from tests.integrations.conftest import Texts, plan_of, watch_sizes

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

from autofit.integrations.accelerator import accelerator_arguments  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Accelerate keeps one global state per process."""
    yield
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


@pytest.fixture
def plan(bert: Any) -> Plan:
    return plan_of(bert, precision="bfloat16")


def test_a_loop_with_accumulate(bert: Any, texts: Texts, plan: Plan) -> None:
    """Precision and accumulation from the plan, the loader's batch its micro-batch; the loss falls."""
    accelerator = accelerate.Accelerator(**accelerator_arguments(plan))
    loader = DataLoader(texts, batch_size=plan.candidate.micro_batch_size)
    model, optimizer, loader = accelerator.prepare(bert, torch.optim.AdamW(bert.parameters(), lr=3e-3), loader)
    stepped, losses = 0, []
    for _ in range(4):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                stepped += accelerator.sync_gradients
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    assert accelerator.mixed_precision == "bf16"
    assert stepped == 16
    assert sum(losses[-8:]) < sum(losses[:8])


def test_the_plan_s_step_on_what_accelerate_prepared(bert: Any, texts: Texts, plan: Plan) -> None:
    """TrainStep splits the batches that Accelerate's loader gives, and steps its optimizer."""
    accelerator = accelerate.Accelerator(cpu=True)
    loader = DataLoader(texts, batch_size=plan.target_batch)
    model, optimizer, loader = accelerator.prepare(bert, torch.optim.AdamW(bert.parameters(), lr=3e-3), loader)
    step = plan.train_step(model, optimizer)
    seen = watch_sizes(model)
    losses = [step(batch).loss.item() for _ in range(4) for batch in loader]
    assert seen == [4] * 64
    assert sum(losses[-4:]) < sum(losses[:4])


def test_an_uneven_plan_is_refused(bert: Any) -> None:
    """One batch size is all that the loader has."""
    with pytest.raises(ConfigError, match="Accelerate takes one batch size"):
        accelerator_arguments(plan_of(bert, steps=3))


def test_shares_that_differ_between_ranks_are_refused(bert: Any) -> None:
    """17 samples on 2 ranks are 9 and 8: one batch size would miss the target."""
    plan = plan_of(bert, target=17, steps=1).model_copy(update={"world_size": 2})
    with pytest.raises(ConfigError, match="17 samples on 2 ranks are not the same number on each"):
        accelerator_arguments(plan)
