"""A saved plan meets this machine again: it holds, it does not fit, or it is for something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autofit
from autofit import preflight
from autofit.errors import ConfigError, PlanMismatchError, StepError
from autofit.plan import Plan
from tests.models import ConvNet, image_batch
from tests.states import FullState

SPACE = autofit.SearchSpace(accumulation_steps=3, precision="float32", checkpointing="none")


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan for a small CNN: 8 samples in micro-batches of 3, 3 and 2."""
    torch.manual_seed(0)
    return autofit.tune(
        ConvNet(width=8), image_batch(4, size=16), target_batch=8, budget="64MiB", space=SPACE, loss_fn=F.cross_entropy
    )


def check(plan: Plan, model: nn.Module | None = None, **options: Any) -> preflight.PlanCheck:
    return plan.check(model or ConvNet(width=8), image_batch(4, size=16), loss_fn=F.cross_entropy, **options)


def elsewhere(plan: Plan, **changes: Any) -> Plan:
    """The plan as another machine or model would have written it."""
    return plan.model_copy(update={"environment": plan.environment.model_copy(update=changes)})


def test_a_plan_holds_where_it_was_made(plan: Plan) -> None:
    """The same peak as the plan's, no differences, and the model is as before."""
    model = ConvNet(width=8)
    optimizer = torch.optim.AdamW(model.parameters())
    before = FullState(model, optimizer)
    result = check(plan, model, optimizer=optimizer)
    assert result.holds
    assert result.whole_step
    assert result.differences == ()
    assert result.trial.candidate == plan.candidate
    assert result.trial.peak_reserved_bytes == plan.best.peak_reserved_bytes
    assert result.budget_bytes == plan.budget_bytes
    assert before.differences(model, optimizer) == []
    assert preflight.PlanCheck.model_validate_json(result.model_dump_json()) == result


def test_at_the_plan_s_own_peak_it_holds_and_below_it_does_not(plan: Plan) -> None:
    """The cap is enforced, not estimated, and another budget is named as a difference."""
    peak = plan.best.peak_reserved_bytes or 0
    assert check(plan, budget=peak).holds
    result = check(plan, budget=peak // 4)
    assert not result.holds
    assert result.trial.outcome == "out_of_memory"
    assert result.differences[0].startswith("budget: plan has 64.0 MiB, here is ")


def test_a_long_step_is_checked_by_its_largest_micro_batch(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """On gradients and state that are there, so it still does not fit where the whole step would not."""
    monkeypatch.setattr(preflight, "LONG_SECONDS", 0.0)
    seen: list[int] = []
    model = ConvNet(width=8)
    model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    result = check(plan, model)
    assert result.holds
    assert not result.whole_step
    assert seen == [3, 3, 3]
    assert not check(plan, budget=(plan.best.peak_reserved_bytes or 0) // 4).holds


OTHER_PLACES = {
    "device_name": "NVIDIA H100",
    "torch_version": "2.0.0",
    "autofit_version": "0.0.1",
    "compute_capability": "9.0",
    "cuda_version": "13.0",
    "threads": 1000,
    "optimizer": "SGD",
    "memory_source": "measured",
}


@pytest.mark.parametrize("name", OTHER_PLACES)
def test_another_place_is_named_and_the_check_goes_on(plan: Plan, name: str) -> None:
    """What only may change the figures is reported beside them."""
    result = check(elsewhere(plan, **{name: OTHER_PLACES[name]}))
    assert result.holds
    here = getattr(plan.environment, name)
    assert result.differences == (f"{name}: plan has {OTHER_PLACES[name]}, here is {here}",)


def test_a_budget_above_the_device_becomes_what_is_free(plan: Plan) -> None:
    """A plan from a larger machine is checked with what there is here."""
    result = check(plan.model_copy(update={"budget_bytes": 2**50}))
    assert result.holds
    assert result.budget_bytes < 2**50
    assert result.differences[0].startswith("budget: plan has 1048576.0 GiB")


def test_another_model_or_kind_of_device_is_no_match(plan: Plan) -> None:
    """Nothing is run; the error names each difference."""
    with pytest.raises(PlanMismatchError, match="for something else") as caught:
        check(plan, ConvNet(width=4))
    assert [d.partition(":")[0] for d in caught.value.differences] == ["parameters", "trainable_parameters"]
    with pytest.raises(PlanMismatchError) as caught:
        check(elsewhere(plan, device="cuda:0", device_name="NVIDIA H100"), device="cpu")
    assert caught.value.differences[0] == "device: plan has cuda, here is cpu"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator is here")
def test_a_plan_for_an_accelerator_that_is_not_here(plan: Plan) -> None:
    """The kind of device is the plan's unless another is asked for; a device that was asked for is a plain error."""
    with pytest.raises(PlanMismatchError, match="NVIDIA H100") as caught:
        check(elsewhere(plan, device="cuda:0", device_name="NVIDIA H100"))
    assert caught.value.differences == ("device: plan has cuda, here is cpu",)
    with pytest.raises(ConfigError, match="not available here"):
        check(plan, device="cuda")


def test_a_precision_that_is_not_computed_here(plan: Plan) -> None:
    """TF32 exists on some GPUs only."""
    candidate = plan.candidate.model_copy(update={"precision": "tf32"})
    trial = plan.best.model_copy(update={"candidate": candidate})
    with pytest.raises(PlanMismatchError, match="tf32"):
        check(plan.model_copy(update={"trials": (trial,), "best_number": trial.number}))


def test_a_step_that_fails_is_an_error(plan: Plan) -> None:
    """Neither holds nor does not fit."""
    model = ConvNet(width=8)

    def fail(*_: Any) -> None:
        raise RuntimeError("shapes do not match")

    model.register_forward_hook(fail)
    with pytest.raises(StepError, match="shapes do not match"):
        check(plan, model)


def test_what_the_plan_remembers_of_the_loss_is_used(plan: Plan) -> None:
    """As by train_step: where samples lie need not be said again, a loss function has to be."""
    with pytest.raises(ConfigError, match="check was not given it"):
        plan.check(ConvNet(width=8), image_batch(4, size=16))
    time_first = (torch.randn(5, 4, 3), torch.randn(5, 4, 1))
    space = autofit.SearchSpace(accumulation_steps=2, precision="float32", checkpointing="none")
    other = autofit.tune(nn.Linear(3, 1), time_first, target_batch=8, batch_dims=1, budget="64MiB", space=space)
    assert other.check(nn.Linear(3, 1), time_first).holds
