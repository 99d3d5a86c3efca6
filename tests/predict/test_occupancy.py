"""Memory over one step, part by part: it adds up, its phases come in order, and its peak is the predictor's."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from autofit.candidate import Candidate, Checkpointing
from autofit.insight import StepMemory
from autofit.predict import Predictor


def predictor() -> Predictor:
    """Six equal blocks with far more activations than weights."""
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(6)]
    return Predictor(nn.Sequential(*blocks), (torch.randn(4, 16), torch.randn(4, 16)), device="cpu")


PREDICTOR = predictor()


def memory(size: int, steps: int, checkpointing: Checkpointing | None = None) -> StepMemory:
    """The memory of a step over full micro-batches."""
    candidate = Candidate(
        micro_batch_size=size, accumulation_steps=steps, checkpointing=checkpointing or Checkpointing()
    )
    return PREDICTOR.step_memory(candidate, samples=size * steps)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_phases_come_in_the_order_of_the_step(steps: int) -> None:
    """At most two micro-batches are drawn, then the optimizer."""
    phases = memory(256, steps).phases
    assert [start.phase for start in phases] == [*["forward", "backward"] * min(steps, 2), "optimizer"]
    places = [start.at for start in phases]
    assert places[0] == 0
    assert all(one < other for one, other in pairwise(places))


@pytest.mark.parametrize("steps", [1, 3])
def test_the_peak_is_the_predictors(steps: int) -> None:
    """Fewer moments than events, and the highest is among them."""
    candidate = Candidate(micro_batch_size=256, accumulation_steps=steps)
    step = memory(256, steps)
    assert step.peak_bytes == PREDICTOR.predict(candidate).peak_allocated_bytes
    assert step.needed_bytes == PREDICTOR.needed_bytes(candidate)
    assert sum(step.at_peak().values()) == step.peak_bytes


def test_parts_are_what_they_are_called() -> None:
    """Weights and Adam's two moments stay; activations come and go; gradients last until the optimizer has run."""
    step = memory(256, 1)
    parts = step.parts.series()
    weights = parts["weights"]
    assert len(set(weights)) == 1
    assert min(parts["optimizer_states"]) >= 2 * weights[0]
    assert max(parts["activations"]) > 10 * weights[0]
    assert parts["activations"][-1] == parts["gradients"][-1] == 0
    assert step.peak_phase() in ("forward", "backward")


def test_recomputing_shows() -> None:
    """With every block recomputed, far fewer activations are held at any moment."""
    names = tuple(str(number) for number in range(6))
    plain, recomputed = memory(256, 1), memory(256, 1, Checkpointing(mode="full", blocks=names))
    assert max(recomputed.parts.activations) < 0.6 * max(plain.parts.activations)


def test_a_step_survives_json() -> None:
    """Series are one string each in JSON, and come back as numbers."""
    step = memory(64, 2)
    text = step.model_dump_json()
    assert '"weights":"' in text
    assert StepMemory.model_validate_json(text) == step
