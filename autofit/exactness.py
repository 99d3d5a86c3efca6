"""What a precision does to training: the loss after a few steps, held against float32 from the same start."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from autofit.candidate import Candidate, Precision
from autofit.oom import Failure
from autofit.stepping import step_until_applied
from autofit.trial import TrialSetup
from autofit.verdict import UnstableError

# Optimizer steps before the loss is compared: enough for weights, gradients and optimizer state to differ.
STEPS = 4


@dataclass(frozen=True)
class Comparison:
    """The loss of one batch of `samples` after `STEPS` optimizer steps on it, in `precision` and in float32."""

    precision: Precision
    samples: int
    loss: float
    float32_loss: float

    @property
    def difference(self) -> float:
        """How far apart the losses are, relative to float32's."""
        return abs(self.loss - self.float32_loss) / max(abs(self.float32_loss), 1e-12)

    def __str__(self) -> str:
        return (
            f"In {self.precision} the loss after {STEPS} steps on {self.samples} sample(s) is {self.loss:.6g}, in "
            f"float32 from the same start {self.float32_loss:.6g}: {self.difference:.2%} apart."
        )


def compare_with_float32(candidate: Candidate, setup: TrialSetup) -> Comparison | str:
    """Trains a few steps in the candidate's precision and in float32, from the same values and random states.

    On the sample batch, or as much of it as fits in float32. Returns why where the losses cannot be compared; raises
    UnstableError when the candidate's own is not finite. Afterwards the model is as it was.
    """
    samples = min(setup.layout.samples, candidate.micro_batch_size)
    while True:
        exact, failure = _loss_after(candidate, "float32", samples, setup)
        if exact is not None:
            own, failure = _loss_after(candidate, candidate.precision, samples, setup)
            if own is not None:
                return Comparison(candidate.precision, samples, own, exact)
        assert failure is not None
        if exact is not None and isinstance(failure.error, UnstableError):
            raise UnstableError(f"after {STEPS} steps, {failure.message}")
        if failure.kind not in ("memory", "maybe_memory") or samples == 1:
            return f"What {candidate.precision} does to the loss could not be compared with float32: {failure.message}."
        samples //= 2


def _loss_after(
    candidate: Candidate, precision: Precision, samples: int, setup: TrialSetup
) -> tuple[float | None, Failure | None]:
    plain = candidate.model_copy(update={"micro_batch_size": samples, "accumulation_steps": 1, "precision": precision})
    return setup.attempt(_train, plain, samples)


def _train(setup: TrialSetup, candidate: Candidate, samples: int) -> float:
    step = setup.train_step(candidate)
    parts = step.split(setup.batch_of(samples))
    with step.activated():
        for _ in range(STEPS):
            step_until_applied(step, parts)
        with torch.no_grad():
            loss = sum(float(step.loss_share(part)) for part in parts)
    if not math.isfinite(loss):
        raise UnstableError(f"the loss is {loss} in {candidate.precision}")
    return loss
