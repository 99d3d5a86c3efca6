"""Does a plan still hold here? Its best candidate once more, for real, on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from autofit.candidate import FrozenModel, balanced
from autofit.device import check_precision, device_info, resolve_device
from autofit.distributed import Team, team_of_all, world_size
from autofit.environment import describe_environment
from autofit.errors import ConfigError, PlanMismatchError, StepError
from autofit.plan import Environment, Plan, Trial
from autofit.preparation import Prepared, prepared
from autofit.step.accumulation import LossOptions
from autofit.trial import meter_trial
from autofit.units import format_bytes

if TYPE_CHECKING:
    from torch.optim import Optimizer

# A step that takes longer is checked by its largest micro-batch alone, for a pre-flight is to take seconds.
LONG_SECONDS = 5.0
# A rank that does not answer for so long is stuck.
RANK_SECONDS = 600.0


class CheckOptions(LossOptions, total=False):
    """What a check may be told beyond the model and a batch; as `autofit.tune`."""

    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer] | None
    device: str | torch.device | None
    budget: str | int | float | None


class PlanCheck(FrozenModel):
    """Whether a plan's best candidate fits here, and what differs from where it was made.

    `trial` is the candidate as it ran just now, metered under `cap_bytes` and not timed. `whole_step` is False where
    only its largest micro-batch was run. `differences` each read `name: plan has …, here is …`.
    """

    holds: bool
    differences: tuple[str, ...]
    trial: Trial
    whole_step: bool
    budget_bytes: int
    cap_bytes: int
    seconds: float


def check_plan(
    plan: Plan,
    model: nn.Module,
    sample_batch: Any,
    **options: Unpack[CheckOptions],
) -> PlanCheck:
    """Runs the plan's best candidate on this model and batch, under the plan's budget unless another is given.

    The whole effective step runs, or its largest micro-batch alone where the plan says that all of them take longer
    than 5 seconds. Afterwards everything is as it was. A plan's budget above what the device has becomes what is free.

    Raises PlanMismatchError when the plan is for another model or kind of device, so that running it would say nothing,
    StepError when the step fails for a reason that is not memory, InfeasibleError when not even the model fits.
    """
    began = time.monotonic()
    candidate, seconds = plan.candidate, plan.best.micro_step_seconds
    whole = seconds is not None and (candidate.accumulation_steps + 1) * seconds <= LONG_SECONDS
    device = _device(plan, options.get("device"), model)
    if plan.world_size != world_size():
        raise ConfigError(
            f"The plan is for {plan.world_size} rank(s), and {world_size()} are here. Start the check with torchrun "
            f"--nproc-per-node {plan.world_size}, in an initialised process group."
        )
    with ExitStack() as entered:
        team = entered.enter_context(team_of_all(timeout=RANK_SECONDS))
        here = entered.enter_context(_prepared(plan, model, sample_batch, options, device=device, team=team))
        differences = _compare(plan, here, model)
        setup = here.setup
        trial = team.lead(setup, lambda: meter_trial(candidate, setup, whole=whole), recover=setup.recover)
    if trial.outcome not in ("feasible", "out_of_memory", "over_budget"):
        raise StepError(f"The plan's step does not run on this {type(model).__name__}: {trial.message}.")
    return PlanCheck(
        holds=trial.feasible,
        differences=differences,
        trial=trial,
        whole_step=whole,
        budget_bytes=here.allowance.budget_bytes,
        cap_bytes=here.allowance.cap_bytes,
        seconds=time.monotonic() - began,
    )


def _prepared(
    plan: Plan, model: nn.Module, sample_batch: Any, options: CheckOptions, *, device: torch.device, team: Team
) -> AbstractContextManager[Prepared]:
    return prepared(
        model,
        sample_batch,
        samples=balanced(plan.target_batch, team.size)[team.rank],
        optimizer=options.get("optimizer"),
        device=device,
        budget=_budget(plan, options.get("budget"), device),
        loss_options={
            "loss_fn": options.get("loss_fn"),
            "compute_loss": options.get("compute_loss"),
            "loss_weight": options.get("loss_weight"),
            "batch_dims": options.get("batch_dims"),
        },
        team=team,
        target_samples=plan.target_batch,
    )


def _device(plan: Plan, device: str | torch.device | None, model: nn.Module) -> torch.device:
    """The device that was named, else the model's own if it is of the plan's kind, else the first of that kind."""
    kind = torch.device(plan.environment.device).type
    held = next(model.parameters()).device
    wanted = device or (held if held.type == kind else kind)
    try:
        return resolve_device(wanted, model)
    except ConfigError as error:
        if device is not None:
            raise
        difference = _difference("device", kind, held.type)
        raise PlanMismatchError(
            f"The plan was made for a {plan.environment.device_name} ({plan.environment.device}). {error}",
            differences=(difference,),
        ) from error


def _budget(plan: Plan, budget: str | int | float | None, device: torch.device) -> str | int | float | None:
    if budget is not None:
        return budget
    return plan.budget_bytes if plan.budget_bytes <= device_info(device).total_bytes else None


def _compare(plan: Plan, here: Prepared, model: nn.Module) -> tuple[str, ...]:
    """What differs; raises PlanMismatchError when it makes the check meaningless."""
    environment = describe_environment(
        model,
        here.info,
        memory_source=here.setup.meter.source,
        optimizer=type(here.setup.make_optimizer()).__name__,
        seed=plan.environment.seed,
    )
    decisive = tuple(_other_subject(plan.environment, environment))
    others = (*_other_place(plan.environment, environment), *_other_budget(plan, here))
    if decisive:
        raise PlanMismatchError(
            f"The plan is for something else: {'; '.join(decisive)}. Tune again, or check with what it was made for.",
            differences=(*decisive, *others),
        )
    try:
        check_precision(plan.candidate.precision, here.info)
    except ConfigError as error:
        raise PlanMismatchError(f"The plan's precision cannot be used here: {error}", differences=others) from error
    return others


def _other_subject(plan: Environment, here: Environment) -> Iterator[str]:
    for name in ("model", "parameters", "trainable_parameters"):
        if getattr(plan, name) != getattr(here, name):
            yield _difference(name, getattr(plan, name), getattr(here, name))
    kinds = [environment.device.partition(":")[0] for environment in (plan, here)]
    if kinds[0] != kinds[1]:
        yield _difference("device", *kinds)


def _other_place(plan: Environment, here: Environment) -> Iterator[str]:
    """Differences that leave the check meaningful: the figures may be others here, and it says which."""
    totals = [format_bytes(environment.device_total_bytes) for environment in (plan, here)]
    for name in ("device_name", "compute_capability", "cuda_version", "torch_version", "autofit_version"):
        if getattr(plan, name) != getattr(here, name):
            yield _difference(name, getattr(plan, name), getattr(here, name))
    if totals[0] != totals[1]:
        yield _difference("device_total", *totals)
    for name in ("threads", "memory_source", "optimizer"):
        if getattr(plan, name) != getattr(here, name):
            yield _difference(name, getattr(plan, name), getattr(here, name))


def _other_budget(plan: Plan, here: Prepared) -> Iterator[str]:
    if plan.budget_bytes != here.allowance.budget_bytes:
        yield _difference("budget", format_bytes(plan.budget_bytes), format_bytes(here.allowance.budget_bytes))


def _difference(name: str, plan: Any, here: Any) -> str:
    return f"{name}: plan has {plan}, here is {here}"
