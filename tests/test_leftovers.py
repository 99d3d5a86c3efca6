"""A leak check after every trial: what stayed, how much, and who holds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autofit
from autofit.candidate import SearchSpace
from autofit.leftovers import Leftovers
from benchmarks import leaks
from tests.models import Wide, vector_batch

kept_outputs: list[torch.Tensor] = []


class Hoarder(Wide):
    """Keeps what it computes where no snapshot looks: in a list of its module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept_outputs.append(torch.ones(2048))
        return super().forward(x)


def tune(model: Wide) -> autofit.Plan:
    space = SearchSpace(precision="float32", checkpointing="none")
    return autofit.tune(model, vector_batch(), target_batch=2, device="cpu", max_trials=2, space=space)


def test_the_holder_is_named() -> None:
    """A plan says that the model hoards, what, and where; said once, not after every trial."""
    try:
        plan = tune(Hoarder())
    finally:
        kept_outputs.clear()
    (note,) = [note for note in plan.notes if "stayed in" in note]
    assert "float32 [2048]" in note
    assert "`kept_outputs`" in note


def test_nothing_stays_of_a_model_that_keeps_nothing() -> None:
    """Neither feasible trials nor those out of memory leave a tensor."""
    assert not [note for note in tune(Wide()).notes if "stayed in" in note]


def test_looks_are_since_the_last_look() -> None:
    """What was seen once is not counted again."""
    looking = Leftovers(torch.device("cpu"))
    held: list[Any] = [torch.ones(4096)]
    assert looking.look("one") == 4 * 4096
    assert looking.look("two") == 0
    assert len(looking.notes) == 1
    held.clear()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_trials_leave_nothing() -> None:
    """B8: half of them out of memory; tensors, objects and host memory stay flat."""
    readings = leaks.run(1000)
    assert readings[-1]["out_of_memory"] == 500
    grown = leaks.growth(readings)
    assert grown["live_tensors"] <= 0
    assert grown["gc_objects"] <= leaks.ALLOWED_OBJECTS
    assert grown["host_bytes"] <= leaks.ALLOWED_HOST_BYTES
