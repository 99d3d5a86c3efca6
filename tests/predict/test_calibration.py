"""Predictions against the host allocator's own events: torch.profiler sees every block, inside operators too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from autofit.candidate import Candidate, Checkpointing
from autofit.errors import ConfigError
from autofit.predict import Predictor, predict_memory
from benchmarks import host_steps
from benchmarks.host_steps import Workload, compare
from tests.models import ConvNet, image_batch
from tests.states import FullState


def rows(model: nn.Module, pixels: int, monkeypatch: pytest.MonkeyPatch) -> list[host_steps.Row]:
    """SGD in float32, with and without checkpointing, even and uneven."""
    monkeypatch.setattr(host_steps, "PRECISIONS", ("float32",))
    monkeypatch.setattr(host_steps, "OPTIMIZERS", {"SGD": host_steps.OPTIMIZERS["SGD"]})
    return list(compare(Workload("a model", lambda: model, image_batch(6, pixels), F.cross_entropy), ()))


def test_where_operators_take_memory_for_themselves_it_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution on large images takes scratch: without it the prediction is far too low, with it much nearer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 7), nn.ReLU(), nn.Conv2d(8, 8, 7), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    found = rows(nn.Sequential(*model, nn.Linear(8, 10)), 64, monkeypatch)
    assert found
    for row in found:
        assert row.traced_bytes < row.measured_bytes
        assert abs(row.calibrated_bytes - row.measured_bytes) < (row.measured_bytes - row.traced_bytes) / 2


def test_a_residual_network_is_predicted_within_a_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    """ResNet-18 with its optimizer step, recomputed or not."""
    found = rows(torchvision.models.resnet18(num_classes=10), 32, monkeypatch)
    assert {row.checkpointing for row in found} == {"none", "full"}
    for row in found:
        assert row.calibrated_bytes == pytest.approx(row.measured_bytes, rel=0.01)


def test_calibrating_changes_nothing_and_is_said() -> None:
    """Two small steps run for real; the model is afterwards what it was. What was learned is a line of its own."""
    torch.manual_seed(0)
    model = ConvNet()
    before = FullState(model)
    candidate = Candidate(micro_batch_size=6, accumulation_steps=2)
    prediction = predict_memory(model, image_batch(), candidate, device="cpu", calibrate=True)
    assert before.differences(model) == []
    assert "learned from micro-batches" in prediction.notes[0]
    assert "scratch" in type(prediction.breakdown).model_fields


def test_masks_are_woven_from_calibrated_traces_too() -> None:
    """A mixed mask is predicted with what operators take inside."""
    model = ConvNet()
    predictor = Predictor(model, image_batch(), device="cpu", calibrate=True)
    blocks = predictor.observed_blocks(host_steps.discover_blocks(model))
    predictor.follow(blocks)
    mixed = Checkpointing.of(dict(zip(blocks.names, ("full", "none", "full"), strict=True)))
    candidate = Candidate(micro_batch_size=6, accumulation_steps=2, checkpointing=mixed)
    plain = predictor.predict(candidate.model_copy(update={"checkpointing": Checkpointing()}))
    assert predictor.masks("float32") is not None
    assert predictor.predict(candidate).peak_requested_bytes <= plain.peak_requested_bytes


def test_a_model_that_lies_elsewhere_cannot_be_calibrated() -> None:
    """There is nothing to run."""
    with torch.device("meta"):
        model = ConvNet()
    with pytest.raises(ConfigError, match="calibrate=True runs a small step on 'cpu'"):
        predict_memory(
            model, image_batch(), Candidate(micro_batch_size=4, accumulation_steps=1), device="cpu", calibrate=True
        )
