"""Predictions against the meter that trials use, and what a prediction must leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autofit.batch import infer_layout
from autofit.candidate import Candidate, Checkpointing, Precision
from autofit.errors import ConfigError
from autofit.memory import meter_for, replay
from autofit.predict import MemoryPrediction, Predictor, UntraceableError, predict_memory
from autofit.predict.line import SizedTrace
from autofit.predict.prediction import allocator_events
from autofit.predict.tracing import trace_step
from autofit.step import TrainStep
from autofit.units import MiB
from tests.models import ConvNet, Wide, image_batch, vector_batch
from tests.states import FullState

CPU = torch.device("cpu")
BLOCKS = Checkpointing(mode="full", blocks=("blocks.0", "blocks.1", "blocks.2"))
ONE = Candidate(micro_batch_size=4, accumulation_steps=1)


def metered(model: nn.Module, batch: Any, candidate: Candidate, make: Callable[..., Any], **options: Any) -> Any:
    """What the tracked meter reads while a trial's two optimizer steps run."""
    step = TrainStep(model, make(model.parameters()), candidate, device=CPU, **options)
    samples = sum(candidate.split(candidate.micro_batch_size * candidate.accumulation_steps)[:2])
    parts = step.split(infer_layout(batch).resize(batch, samples))
    resident = [*model.parameters(), *model.buffers()]
    with step.activated(), meter_for(CPU).metered(cap_bytes=None, resident=resident) as read:
        for some in (parts[:1], parts):
            step.zero_grad()
            losses = [step.micro_step(part) for part in some]
            step.optimizer_step()
            step.zero_grad()
            del losses
        return read()


@pytest.mark.parametrize("checkpointing", [Checkpointing(), BLOCKS], ids=str)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("size", "steps"), [(3, 1), (7, 1), (4, 3)])
def test_predictions_equal_the_tracked_meter(
    checkpointing: Checkpointing, precision: Precision, size: int, steps: int
) -> None:
    """Allocated and reserved peaks to the byte, over precisions, recomputation and accumulation."""
    candidate = Candidate(
        micro_batch_size=size, accumulation_steps=steps, precision=precision, checkpointing=checkpointing
    )
    model, batch = ConvNet(), image_batch(4)
    predicted = predict_memory(model, batch, candidate, loss_fn=F.cross_entropy, device="cpu")
    reading = metered(model, batch, candidate, torch.optim.AdamW, loss_fn=F.cross_entropy)
    assert predicted.peak_allocated_bytes == reading.peak_allocated_bytes
    assert predicted.peak_reserved_bytes == reading.peak_reserved_bytes


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adafactor": torch.optim.Adafactor,
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_predictions_hold_for_every_kind_of_optimizer(name: str) -> None:
    """A large weight and small activations: the peak is the optimizer's."""
    model, batch, make = Wide(), vector_batch(), OPTIMIZERS[name]
    predicted = predict_memory(model, batch, ONE, loss_fn=F.cross_entropy, optimizer=make, device="cpu")
    reading = metered(model, batch, ONE, make, loss_fn=F.cross_entropy)
    assert predicted.peak_allocated_bytes == reading.peak_allocated_bytes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_prediction_leaves_everything_as_it_was(device: str) -> None:
    """Weights, buffers, gradients, modes, random states, switches, and the optimizer with its state, bit for bit."""
    model, batch = ConvNet(), image_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    model.eval()
    model.blocks[1].train()
    before = FullState(model, optimizer)
    for precision in ("float32", "float16"):
        candidate = ONE.model_copy(update={"precision": precision, "checkpointing": BLOCKS})
        predict_memory(model, batch, candidate, loss_fn=F.cross_entropy, optimizer=optimizer, device=device)
    assert before.differences(model, optimizer) == []


def test_the_optimizers_own_state_is_counted() -> None:
    """An optimizer that has stepped has its state from the start; a new one gets it in the first step: same peak."""
    model, batch = Wide(), vector_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"loss_fn": F.cross_entropy, "device": "cpu"}
    fresh = predict_memory(model, batch, ONE, optimizer=optimizer, **options)
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    stepped = predict_memory(model, batch, ONE, optimizer=optimizer, **options)
    assert fresh.breakdown.optimizer_states == pytest.approx(stepped.breakdown.optimizer_states, rel=0.01)
    assert stepped.breakdown.optimizer_states >= 2 * stepped.breakdown.weights


def test_a_model_without_values_can_be_predicted() -> None:
    """A model on `meta` takes no memory here and needs what the real one needs."""
    real, batch = ConvNet(), image_batch()
    with torch.device("meta"):
        shapes = ConvNet()
    first, second = (predict_memory(model, batch, ONE, loss_fn=F.cross_entropy) for model in (real, shapes))
    assert first == second


def test_one_line_answers_every_micro_batch() -> None:
    """What two traces say of a size equals the trace of that size."""
    model, batch = ConvNet(), image_batch()
    line = Predictor(model, batch, loss_fn=F.cross_entropy)
    for size, steps in ((16, 1), (37, 3)):
        candidate = Candidate(micro_batch_size=size, accumulation_steps=steps)
        predicted = line.predict(candidate)
        traced = trace_step(line.subject, candidate)
        peaks = replay(allocator_events(SizedTrace(traced, traced.sizes)))
        assert (predicted.peak_allocated_bytes, predicted.peak_reserved_bytes) == (
            peaks.peak_allocated_bytes,
            peaks.peak_reserved_bytes,
        )


def test_a_prediction_explains_its_peak() -> None:
    """The breakdown adds up to the allocated peak, and the three peaks are in order."""
    prediction = predict_memory(ConvNet(), image_batch(), ONE, loss_fn=F.cross_entropy, gpu="RTX 4090")
    assert sum(prediction.breakdown.model_dump().values()) == prediction.peak_allocated_bytes
    assert prediction.peak_allocated_bytes <= prediction.fit_threshold_bytes <= prediction.peak_reserved_bytes
    assert prediction.device_bytes == prediction.peak_reserved_bytes + prediction.context_bytes
    assert max(point.allocated_bytes for point in prediction.timeline) == pytest.approx(
        prediction.peak_allocated_bytes, rel=0.02
    )
    assert len(prediction.timeline) <= 400
    assert prediction.breakdown.activations > prediction.breakdown.weights > 0
    assert MemoryPrediction.model_validate_json(prediction.model_dump_json()) == prediction


@pytest.mark.parametrize(("gpu", "each"), [("RTX 4090", 8320 * 1024), ("H200", 32 * MiB), ("B200", 32 * MiB)])
def test_two_cublas_workspaces_are_counted(gpu: str, each: int) -> None:
    """One of the thread that runs forward and one of the thread that runs backward."""
    prediction = predict_memory(Wide(), vector_batch(), ONE, loss_fn=F.cross_entropy, gpu=gpu)
    assert prediction.breakdown.workspaces == 2 * each


def test_lists_are_the_optimizers_default_on_cuda() -> None:
    """Multi-tensor AdamW takes the square roots of all second moments at once; on the host it goes one by one."""
    cuda, cpu = (
        predict_memory(Wide(), vector_batch(), ONE, loss_fn=F.cross_entropy, device=device)
        for device in ("cuda", "cpu")
    )
    assert cuda.phase == cpu.phase == "optimizer"
    assert cuda.operator == "aten::_foreach_sqrt"


def test_recomputing_costs_less_memory_and_accumulating_keeps_gradients() -> None:
    """The directions in which a tuner turns."""
    predictor = Predictor(ConvNet(), image_batch(), loss_fn=F.cross_entropy, gpu="A100 40GB")
    size = Candidate(micro_batch_size=64, accumulation_steps=2)
    plain = predictor.predict(size)
    recomputed = predictor.predict(size.model_copy(update={"checkpointing": BLOCKS}))
    lower = predictor.predict(size.model_copy(update={"precision": "bfloat16"}))
    assert recomputed.peak_allocated_bytes < plain.peak_allocated_bytes
    assert lower.peak_allocated_bytes < 0.8 * plain.peak_allocated_bytes


class DataDependent(nn.Module):
    """How much it computes depends on the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x[x.sum(1) > 0])


def test_what_needs_values_is_refused_with_its_operator() -> None:
    """The tuner can say which operator stopped the prediction, and measure instead."""
    predictor = Predictor(DataDependent(), vector_batch(), loss_fn=lambda out, target: out.sum(), device="cpu")
    with pytest.raises(UntraceableError, match="without values") as error:
        predictor.predict(ONE)
    assert error.value.operator is not None
    assert "nonzero" in error.value.operator or "index" in error.value.operator
    assert error.value.__cause__ is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a driver an LSTM can be traced")
def test_an_lstm_on_a_gpu_that_is_not_there_is_refused_by_name() -> None:
    """Its kernels ask the driver; the submodule is named, and nothing is left behind."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory = nn.LSTM(8, 16)
            self.head = nn.Linear(16, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.memory(x)[0])

    with pytest.raises(UntraceableError, match="'memory'") as error:
        predict_memory(Recurrent(), vector_batch(), ONE, loss_fn=F.cross_entropy)
    assert error.value.module == "memory"


def test_a_model_that_fails_anyway_is_no_worse_off() -> None:
    """An error of the model itself comes out as the same refusal, and the model is as it was."""

    class Broken(Wide):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = x
            raise KeyError("label")

    model = Broken()
    before = FullState(model)
    with pytest.raises(UntraceableError, match="KeyError"):
        predict_memory(model, vector_batch(), ONE, loss_fn=F.cross_entropy)
    assert before.differences(model) == []


def test_a_loss_over_all_pairs_is_predicted_and_said() -> None:
    """Sizes that grow with the square of the samples take a trace each, and the notes say why."""

    def pairs(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        return (out @ out.T).exp().mean()

    model, batch = Wide(), vector_batch()
    candidate = Candidate(micro_batch_size=50, accumulation_steps=1)
    predicted = predict_memory(model, batch, candidate, compute_loss=pairs, device="cpu")
    reading = metered(model, batch, candidate, torch.optim.AdamW, compute_loss=pairs)
    assert predicted.peak_allocated_bytes == reading.peak_allocated_bytes
    assert any("traced by itself" in note for note in predicted.notes)


@pytest.mark.parametrize("options", [{"device": "mps"}, {"device": "cpu", "gpu": "RTX 4090"}, {"gpu": "RTX 4900"}])
def test_devices_that_cannot_be_predicted_are_named(options: dict[str, str]) -> None:
    """Only `cuda`, with or without a GPU of the catalogue, and `cpu` without one."""
    with pytest.raises(ConfigError):
        Predictor(Wide(), vector_batch(), **options)  # type: ignore[arg-type]


def test_what_takes_the_memory_is_said():
    """Where the peak is in the optimizer step, recomputation is no advice; elsewhere it may be."""
    whole = Candidate(micro_batch_size=4, accumulation_steps=1)
    heavy = predict_memory(Wide(), vector_batch(), whole, device="cpu").bottleneck
    assert heavy.startswith("The peak is in the optimizer step, with ")
    assert "of optimizer states" in heavy
    assert "Recomputing activations cannot help there; a fused optimizer would save up to" in heavy
    light = predict_memory(ConvNet(), image_batch(64), whole, device="cpu").bottleneck
    assert "of activations" in light
    assert "cannot help" not in light


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_what_a_recurrent_layer_keeps_for_backward_is_counted(kind: type[nn.RNNBase]) -> None:
    """oneDNN's workspace is most of it, and the stand-in of its layer on fake tensors has none."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory = kind(8, 32, batch_first=True, bidirectional=True)
            self.head = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.memory(x)[0][:, -1])

    model, batch = Recurrent(), (torch.randn(12, 10, 8), torch.randint(10, (12,)))
    for size, steps in ((12, 1), (4, 3)):
        candidate = Candidate(micro_batch_size=size, accumulation_steps=steps)
        predicted = predict_memory(model, batch, candidate, loss_fn=F.cross_entropy, device="cpu")
        reading = metered(model, batch, candidate, torch.optim.AdamW, loss_fn=F.cross_entropy)
        assert predicted.peak_allocated_bytes == pytest.approx(reading.peak_allocated_bytes, rel=0.02)
