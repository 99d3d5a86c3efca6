"""A model made ready for trials: on its device, in training mode, under the cap; and afterwards as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.batch import infer_layout
from autofit.boundary import Boundary
from autofit.budget import Budget, resolve_budget, smallest_budget
from autofit.device import DeviceInfo, device_info, resolve_device
from autofit.distributed import Team
from autofit.errors import InfeasibleError
from autofit.memory import Meter, meter_for
from autofit.optimizers import optimizer_factory
from autofit.placement import placed
from autofit.snapshot import restored
from autofit.step.accumulation import LossOptions
from autofit.trial import TrialSetup
from autofit.units import format_bytes


@dataclass(frozen=True)
class Prepared:
    """What trials share, the device that they run on, what the budget became there, and where errors leave."""

    setup: TrialSetup
    info: DeviceInfo
    allowance: Budget
    boundary: Boundary


@contextmanager
def prepared(
    model: nn.Module,
    sample_batch: Any,
    *,
    samples: int,
    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer] | None,
    device: str | torch.device | None,
    budget: str | int | float | None,
    loss_options: LossOptions,
    team: Team | None = None,
    target_samples: int | None = None,
) -> Iterator[Prepared]:
    """Everything that `run_trial` needs, inside; arguments as of `tune`, and `samples` per optimizer step.

    With a `team` of several ranks, `samples` are this one's of `target_samples`, and the smallest cap is everyone's.

    On exit model, optimizer, random states and torch's switches are what they were. Raises ConfigError and
    InfeasibleError as `tune` does; what fails otherwise, also inside, comes out as `boundary` says.
    """
    boundary, team = Boundary(), team or Team()
    with boundary.typed(), ExitStack() as undone:
        layout = infer_layout(sample_batch, batch_dims=loss_options.get("batch_dims"))
        info = device_info(resolve_device(device, model))
        meter = meter_for(info.device)
        make_optimizer = optimizer_factory(optimizer, model)
        undone.enter_context(torch.enable_grad())  # before the snapshot, which puts back the mode that it finds
        _enter_placed(undone, model, info, meter)
        user_optimizer = optimizer if isinstance(optimizer, Optimizer) else None
        beside = (loss_options.get("loss_fn"), loss_options.get("compute_loss"), loss_options.get("loss_weight"))
        snapshot = undone.enter_context(restored(model, user_optimizer, device=info.device, beside=beside))
        undone.enter_context(_training(model))
        allowance = resolve_budget(budget, info=info, meter=meter)
        if team.size > 1:
            allowance = smallest_budget(allowance, team)
        undone.enter_context(meter.capped(allowance.cap_bytes))
        setup = TrialSetup(
            model=model,
            sample_batch=sample_batch,
            layout=layout,
            samples=samples,
            device=info.device,
            meter=meter,
            cap_bytes=allowance.cap_bytes,
            outside_bytes=allowance.outside_bytes,
            snapshot=snapshot,
            make_optimizer=make_optimizer,
            loss_options=loss_options,
            team=team,
            target_samples=target_samples,
        )
        yield Prepared(setup, info, allowance, boundary)


def _enter_placed(undone: ExitStack, model: nn.Module, info: DeviceInfo, meter: Meter) -> None:
    """Moves the model to the device; the device may be too small even for that."""
    try:
        undone.enter_context(placed(model, device=info.device))
        return
    except torch.OutOfMemoryError as error:
        message = str(error)
    meter.release()
    size = sum(parameter.nbytes for parameter in model.parameters())
    raise InfeasibleError(
        f"The model alone, {format_bytes(size)} of parameters, does not fit on {info.name} with "
        f"{format_bytes(info.total_bytes)}: {message}",
        smallest_peak_bytes=size,
    )


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Training mode. A model whose root is in training mode already keeps its submodules as they are: some are frozen.

    Nothing to undo here: the snapshot does it.
    """
    if not model.training:
        model.train()
    yield
