"""What a plan says of the step that won, after the search."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autofit.candidate import Candidate, Checkpointing
from autofit.hindsight import insight
from autofit.insight import Insight
from autofit.predict import Predictor
from autofit.step.blocks import discover_blocks


def insight_into(best: Candidate, *, seconds: float = 60.0, layer: type[nn.Module] = nn.GELU) -> Insight:
    """Of four blocks, 256 samples per optimizer step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 64), layer(), nn.Linear(64, 16)) for _ in range(4)])
    predictor = Predictor(model, (torch.randn(4, 16), torch.randn(4, 16)), device="cpu")
    blocks = discover_blocks(model)
    predictor.follow(blocks)
    return insight(predictor, best, samples=256, blocks=blocks, half="bfloat16", seconds=seconds)


class ReadsAValue(nn.Module):
    """Cannot be traced without values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Its output has as many rows as a value says."""
        return x[: int(x.sum().nan_to_num().clamp(1, 1).numpy())]


def test_everything_is_there_when_there_is_time() -> None:
    """The winner's memory, the naive step's, every block, and each technique that the winner does not use."""
    seen = insight_into(Candidate(micro_batch_size=64, accumulation_steps=4))
    assert seen.best is not None
    assert seen.naive is not None
    assert seen.naive.candidate == Candidate(micro_batch_size=256, accumulation_steps=1)
    assert seen.naive.peak_bytes > seen.best.peak_bytes
    assert len(seen.blocks) == 4
    needed = {other.technique: other.needed_bytes for other in seen.alternatives}
    assert {"smaller_micro_batch", "larger_micro_batch", "full_checkpointing", "bfloat16"} <= set(needed)
    assert needed["smaller_micro_batch"] <= seen.best.needed_bytes <= needed["larger_micro_batch"]
    assert "no_checkpointing" not in needed
    assert "offload" not in needed  # the CPU's activations are in host memory already


def test_a_block_is_judged_by_the_whole_step() -> None:
    """Each saves something and costs time; the last one's memory is needed again at once."""
    effects = insight_into(Candidate(micro_batch_size=256, accumulation_steps=1)).blocks
    assert all(effect.costs_share > 0 for effect in effects)
    assert effects[0].saves_bytes > effects[-1].saves_bytes


def test_the_modes_of_the_winner_are_named() -> None:
    """A block that the plan recomputes says so."""
    names = ("0", "1")
    best = Candidate(micro_batch_size=256, accumulation_steps=1, checkpointing=Checkpointing(mode="full", blocks=names))
    seen = insight_into(best)
    assert [effect.mode for effect in seen.blocks] == ["full", "full", "none", "none"]
    assert "no_checkpointing" in {other.technique for other in seen.alternatives}


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_without_time_nothing_is_said(seconds: float) -> None:
    """A plan is not kept waiting for its report."""
    assert insight_into(Candidate(micro_batch_size=64, accumulation_steps=4), seconds=seconds) == Insight()


def test_what_cannot_be_traced_is_left_out() -> None:
    """No error, no figures."""
    seen = insight_into(Candidate(micro_batch_size=64, accumulation_steps=4), layer=ReadsAValue)
    assert seen == Insight()
