"""Optimizer steps as trials run them: each really applied, and stopped where a loss or a gradient is not finite."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from autofit.step.accumulation import Part
from autofit.step.train_step import TrainStep
from autofit.timing import Round
from autofit.verdict import UnstableError

# Halved so often, the gradient scale goes from its initial 65536 to below 1: what overflows then is not finite at all.
SCALER_ATTEMPTS = 20


def step_until_applied(step: TrainStep, parts: Sequence[Part]) -> float:
    """One optimizer step that really stepped: float16 begins with too large a scale and skips steps until it fits.

    Returns the loss. Raises UnstableError when it is not finite or no scale keeps the gradients finite.
    """
    for _ in range(SCALER_ATTEMPTS):
        step.zero_grad()
        step.begin(parts)
        losses = [step.micro_step(part, last=index == len(parts)) for index, part in enumerate(parts, start=1)]
        scale = step.scaler.get_scale() if step.scaler else 1.0
        step.optimizer_step()
        step.zero_grad()
        values = [float(loss) for loss in losses]
        if not all(map(math.isfinite, values)):
            raise UnstableError(f"the loss is {values} in {step.candidate.precision}")
        if step.scaler is None or step.scaler.get_scale() >= scale:
            return sum(values)
    raise UnstableError(f"the gradients overflow in {step.candidate.precision} at every scale that was tried")


class PacedStep:
    """A step in the two stretches that are timed apart: `micro_steps` alike, and the rest up to the optimizer's end.

    Where ranks exchange gradients in the last micro-step of several, that one belongs to the rest.
    """

    def __init__(self, step: TrainStep, parts: Sequence[Part]) -> None:
        self._step = step
        self._parts = itertools.cycle(parts)
        steps = step.candidate.accumulation_steps
        self._last_apart = steps > 1 and step.candidate.parallelism.mode != "none"
        self.micro_steps = steps - 1 if self._last_apart else steps

    def micro_step(self) -> None:
        """One of those that are alike."""
        self._step.micro_step(next(self._parts), last=not self._last_apart)

    def end_of_step(self) -> None:
        """The last micro-step where it is another than those, and the optimizer step."""
        if self._last_apart:
            self._step.micro_step(next(self._parts))
        self._step.optimizer_step()
        self._step.zero_grad()

    def told_apart(self, rounds: Sequence[Round]) -> list[Round]:
        """The rounds with one micro-step taken out of the rest, so that a step is again all micro-steps and the rest.

        What the exchange adds to the last micro-step counts as the optimizer's.
        """
        if not self._last_apart:
            return list(rounds)
        return [replace(r, optimizer_seconds=max(r.optimizer_seconds - r.micro_step_seconds, 0.0)) for r in rounds]


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
