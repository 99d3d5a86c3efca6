"""Blocks whose recomputation is not what their forward was are found, and left alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.batch import infer_layout
from autofit.fidelity import keep_faithful
from autofit.memory import meter_for
from autofit.optimizers import optimizer_factory
from autofit.snapshot import restored
from autofit.step.blocks import Blocks
from autofit.trial import TrialSetup
from autofit.units import MiB
from tests.models import ConvNet, image_batch

CPU = torch.device("cpu")


class Faithful(nn.Module):
    """Dropout and BatchNorm are no reason: they are recomputed as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(torch.tanh(self.norm(self.up(x)) * self.factor())), 0.2)

    def factor(self) -> Any:
        return 1.0


class Counting(Faithful):
    """What it does depends on how often it was called."""

    calls = 0

    def factor(self) -> float:
        self.calls += 1
        return float(self.calls)


class Drawing(Faithful):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dice = random.Random(0)

    def factor(self) -> float:
        return self.dice.random() + 0.5


class Caching(Faithful):
    """Uses what the last call left."""

    cached: torch.Tensor | None = None

    def factor(self) -> torch.Tensor:
        factor = torch.ones(()) if self.cached is None else self.cached
        self.cached = self.up.weight.detach().mean() + 2
        return factor


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BATCH = (torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0]))


def faithful(model: nn.Module, batch: Any, names: tuple[str, ...]) -> Blocks:
    """What `keep_faithful` leaves of the blocks."""
    with restored(model, None, device=CPU) as snapshot:
        model.train()
        setup = TrialSetup(
            model=model,
            sample_batch=batch,
            layout=infer_layout(batch),
            samples=8,
            device=CPU,
            meter=meter_for(CPU),
            cap_bytes=512 * MiB,
            outside_bytes=0,
            snapshot=snapshot,
            make_optimizer=optimizer_factory(None, model),
        )
        return keep_faithful(setup, Blocks(names, "named", selective=names))


@pytest.mark.parametrize("kind", [Counting, Drawing, Caching])
def test_the_one_block_that_is_not_faithful_is_found(kind: type[nn.Module]) -> None:
    """Among others that are, in whatever place; it is named with the reason."""
    torch.manual_seed(0)
    model = Stack(Faithful(), Faithful(), kind(), Faithful(), Faithful())
    names = tuple(f"blocks.{number}" for number in range(5))
    found = faithful(model, BATCH, names)
    assert found.names == ("blocks.0", "blocks.1", "blocks.3", "blocks.4") == found.selective
    assert found.left_out == (("blocks.2", "recomputing it changes gradients"),)


def test_faithful_blocks_are_all_kept() -> None:
    """With BatchNorm, dropout and convolutions, in both modes."""
    names = ("blocks.0", "blocks.1", "blocks.2")
    found = faithful(ConvNet(), image_batch(), names)
    assert found.names == found.selective == names
    assert found.left_out == ()


def test_tune_says_which_block_was_left_out() -> None:
    """In the notes, by name; the others are still recomputed where memory is short."""
    torch.manual_seed(0)
    model = Stack(Faithful(), Counting(), Faithful())
    space = autofit.SearchSpace(precision="float32", micro_batch_size=[2, 8])
    patterns = space.model_copy(update={"checkpoint_blocks": ("blocks.*",)})
    plan = autofit.tune(model, BATCH, target_batch=8, space=patterns, device="cpu")
    assert any("blocks.1: recomputing it changes gradients" in note for note in plan.notes)
    assert any("Blocks that can be recomputed: 2" in note for note in plan.notes)
    assert model.blocks[1].calls == 0
