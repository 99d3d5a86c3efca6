"""Optimizer steps as trials run them: each really applied, and stopped where a loss or a gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from autofit.step.accumulation import Part
from autofit.step.train_step import TrainStep
from autofit.verdict import UnstableError

# Halved so often, the gradient scale goes from its initial 65536 to below 1: what overflows then is not finite at all.
SCALER_ATTEMPTS = 20


def step_until_applied(step: TrainStep, parts: Sequence[Part]) -> float:
    """One optimizer step that really stepped: float16 begins with too large a scale and skips steps until it fits.

    Returns the loss. Raises UnstableError when it is not finite or no scale keeps the gradients finite.
    """
    for _ in range(SCALER_ATTEMPTS):
        step.zero_grad()
        losses = [step.micro_step(part) for part in parts]
        scale = step.scaler.get_scale() if step.scaler else 1.0
        step.optimizer_step()
        step.zero_grad()
        values = [float(loss) for loss in losses]
        if not all(map(math.isfinite, values)):
            raise UnstableError(f"the loss is {values} in {step.candidate.precision}")
        if step.scaler is None or step.scaler.get_scale() >= scale:
            return sum(values)
    raise UnstableError(f"the gradients overflow in {step.candidate.precision} at every scale that was tried")


def check_gradients(step: TrainStep, part: Part) -> None:
    """One micro-step more, whose gradients are looked at and dropped; raises UnstableError when one is not finite.

    A scaler watches them itself. The largest absolute value tells: it takes no memory, and does not overflow.
    """
    if step.scaler is not None:
        return
    step.micro_step(part)
    names = [name for name, parameter in step.model.named_parameters() if _is_not_finite(parameter.grad)]
    step.zero_grad()
    if names:
        shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        raise UnstableError(
            f"the gradients of {len(names)} parameters ({shown}) are not finite in {step.candidate.precision}"
        )


def _is_not_finite(gradient: torch.Tensor | None) -> bool:
    if gradient is None:
        return False
    values = gradient._values() if gradient.is_sparse else gradient
    return values.numel() > 0 and not math.isfinite(float(torch.linalg.vector_norm(values, ord=math.inf)))


def resident(step: TrainStep) -> Iterator[torch.Tensor]:
    """What is on the device before the first micro-batch of a step."""
    return resident_tensors(step.model, step.optimizer)


def resident_tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Parameters, buffers, and the optimizer's state."""
    yield from model.parameters()
    yield from model.buffers()
    for state in optimizer.state.values():
        yield from (value for value in tree_leaves(state) if isinstance(value, torch.Tensor))
