"""Masks of checkpointing modes: woven from one trace per mode they are what a trace of the mask itself shows."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from autofit.candidate import Candidate, Checkpointing, CheckpointingMode, Precision
from autofit.memory import Peaks, fit_threshold, replay
from autofit.predict import Predictor
from autofit.predict.line import SizedTrace
from autofit.predict.masks import Mask, Masks
from autofit.predict.prediction import allocator_events
from autofit.predict.roofline import REFERENCES, operator_seconds
from autofit.predict.tracing import trace_step
from autofit.step.blocks import discover_blocks
from tests.step.test_checkpointing import Elaborating, Residual, Stack, UNet, tokens, transformers_model

MODES: tuple[CheckpointingMode, ...] = ("none", "full", "selective")
Build = Callable[[], tuple[nn.Module, Any, dict[str, Any]]]


def image_model(build: Callable[[], nn.Module], size: int = 32) -> Build:
    return lambda: (build(), (torch.randn(2, 3, size, size), torch.tensor([0, 1])), {})


def token_model(kind: str) -> Build:
    return lambda: (transformers_model(kind), tokens(), {})


def regression(build: Callable[[], nn.Module], *shape: int) -> Build:
    options = {"compute_loss": lambda model, batch: model(batch).square().mean()}
    return lambda: (build(), torch.randn(*shape), options)


def swin() -> nn.Module:
    return torchvision.models.SwinTransformer([2, 2], 8, [2, 2], [2, 2], [2, 2], num_classes=3)


SMALL: dict[str, Build] = {
    "blocks with BatchNorm and dropout": regression(lambda: Stack(Residual(), Residual(), Residual()), 6, 8),
    "keywords, containers, dataclasses": regression(Elaborating, 6, 8),
    "U-Net": regression(UNet, 2, 3, 16, 16),
    "GPT-2": token_model("gpt2"),
    "T5": token_model("t5"),
    "Swin": image_model(swin),
    "ResNet-18": image_model(partial(torchvision.models.resnet18, num_classes=3)),
}
LARGE: dict[str, Build] = {
    "U-Net": SMALL["U-Net"],
    "GPT-2": SMALL["GPT-2"],
    "T5": SMALL["T5"],
    "Swin-T": image_model(torchvision.models.swin_t, 64),
    "ResNet-50": image_model(torchvision.models.resnet50, 64),
}


class Case:
    """One model on a GPU that is not there, its blocks followed, traced or woven."""

    def __init__(self, build: Build, *, precision: Precision = "float32", device: str = "cuda") -> None:
        model, batch, options = build()
        self.precision: Precision = precision
        self.predictor = Predictor(model, batch, device=device, **options)
        self.blocks = self.predictor.observed_blocks(discover_blocks(model))
        self.predictor.follow(self.blocks)

    @property
    def masks(self) -> Masks:
        masks = self.predictor.masks(self.precision)
        assert masks is not None
        return masks

    def random_mask(self, chance: random.Random) -> Mask:
        fit = self.blocks.selective
        return {name: chance.choice(MODES if name in fit else MODES[:2]) for name in self.blocks.names}

    def woven(self, mask: Mask, samples: int, steps: int = 2) -> Peaks:
        return replay(allocator_events(self.masks.at(mask, (samples,) * steps)))

    def traced(self, mask: Mask, samples: int, steps: int = 2) -> Peaks:
        candidate = Candidate(
            micro_batch_size=samples,
            accumulation_steps=steps,
            precision=self.precision,
            checkpointing=Checkpointing.of(mask),
        )
        # As under any mask: without a cache, of which the trace of no mask would still have one.
        blocks = self.blocks.names
        trace = trace_step(self.predictor.subject, candidate, blocks=blocks)
        return replay(allocator_events(SizedTrace(trace, trace.sizes)))


def assert_near(woven: Peaks, traced: Peaks, share: float) -> None:
    assert woven.peak_allocated_bytes == pytest.approx(traced.peak_allocated_bytes, rel=share)
    assert woven.peak_reserved_bytes == pytest.approx(traced.peak_reserved_bytes, rel=share)


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "float32") for name in SMALL if name != "T5"), ("T5", "bfloat16"), ("ResNet-18", "bfloat16")],
)
def test_a_woven_mask_is_the_traced_one(name: str, precision: Precision) -> None:
    """To the byte, with the optimizer step, at a micro-batch that no trace saw."""
    case, chance = Case(SMALL[name], precision=precision), random.Random(0)
    for _ in range(2):
        mask = case.random_mask(chance)
        assert_near(case.woven(mask, 701), case.traced(mask, 701), 0)


def test_without_accumulation_and_on_the_cpu() -> None:
    """The step of one micro-batch is cut out of that of two; on the CPU gradients are added elsewhere."""
    case, chance = Case(SMALL["ResNet-18"], device="cpu"), random.Random(1)
    mask = case.random_mask(chance)
    assert_near(case.woven(mask, 6, steps=1), case.traced(mask, 6, steps=1), 0)
    assert_near(case.woven(mask, 6), case.traced(mask, 6), 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_200_random_masks_are_within_a_percent(name: str) -> None:
    """Of really tracing each."""
    case, chance = Case(LARGE[name]), random.Random(2)
    for _ in range(200):
        mask = case.random_mask(chance)
        assert_near(case.woven(mask, 4), case.traced(mask, 4), 0.01)


def test_masks_change_memory_and_seconds() -> None:
    """More recomputation is less memory and more time, selective in between where products are dear."""
    case = Case(SMALL["U-Net"])
    clock = partial(operator_seconds, gpu=REFERENCES["cuda"], precision="float32")
    masks = [dict.fromkeys(case.blocks.names, mode) for mode in MODES]
    peaks = [case.woven(mask, 256).peak_allocated_bytes for mask in masks]
    assert peaks[0] > peaks[2] > peaks[1]
    costs = [case.masks.cost(mask, 2**20, clock) for mask in masks]
    assert costs[1] > costs[2] > costs[0] == 0


@pytest.mark.parametrize("name", ["U-Net", pytest.param("T5", marks=pytest.mark.slow)])
def test_the_solver_finds_what_enumeration_finds(name: str) -> None:
    """Over budgets from the least that fits to the most, within 2 % of the cheapest mask."""
    case = Case(SMALL[name])
    masks, sizes = case.masks, (64, 64)
    clock = partial(operator_seconds, gpu=REFERENCES["cuda"], precision="float32")
    seconds = masks.seconds(64, clock)
    choices = list(product(range(len(masks.modes)), repeat=len(masks.blocks)))
    needs = {choice: fit_threshold(allocator_events(masks.at(masks.mask(choice), sizes))) for choice in choices}
    costs = {choice: seconds[range(len(choice)), choice].sum() for choice in choices}
    least, most = min(needs.values()), needs[choices[0]]
    for number in range(20):
        cap = least + (most - least) * number // 20
        found = masks.solve(sizes, cap, clock, modes=MODES)
        assert found is not None
        choice = tuple(masks.modes.index(found[block]) for block in masks.blocks)
        assert needs[choice] <= cap
        assert costs[choice] <= 1.02 * min(cost for choice, cost in costs.items() if needs[choice] <= cap)


def test_only_allowed_modes_are_used() -> None:
    """And blocks that selective recomputation would spoil are not in it."""
    case = Case(SMALL["U-Net"])
    candidate = Candidate(micro_batch_size=1024, accumulation_steps=2)
    plain = case.predictor.predict(candidate).fit_threshold_bytes
    modes: tuple[CheckpointingMode, ...] = ("full", "selective")
    for mode in modes:
        everywhere = Checkpointing.of(dict.fromkeys(case.blocks.names, mode))
        least = case.predictor.predict(candidate.model_copy(update={"checkpointing": everywhere})).fit_threshold_bytes
        cap = (plain + least) // 2
        solved = case.predictor.solve(candidate, samples=2048, cap_bytes=cap, modes=(mode,))
        assert solved is not None
        assert set(solved.checkpointing.modes.values()) == {mode}
        assert least <= case.predictor.predict(solved).fit_threshold_bytes <= cap < plain


def test_what_no_mask_makes_fit() -> None:
    """Nothing is found, and nothing is made up."""
    case = Case(SMALL["U-Net"])
    candidate = Candidate(micro_batch_size=64, accumulation_steps=2)
    assert case.predictor.solve(candidate, samples=128, cap_bytes=2**20, modes=MODES) is None
