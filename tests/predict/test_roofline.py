"""Seconds from a roofline: their order, and a product of matrices by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autofit.candidate import Candidate, Checkpointing, Precision
from autofit.gpus import find_gpu
from autofit.memory import replay
from autofit.predict.line import SizedTrace
from autofit.predict.prediction import allocator_events
from autofit.predict.roofline import LAUNCH_SECONDS, MATRIX_SHARE, operator_seconds
from autofit.predict.splice import without_second
from autofit.predict.step_predictor import StepPredictor
from autofit.predict.tracing import trace_step
from autofit.predict.work import Operation, Tally, work_at
from tests.models import ConvNet, Wide, image_batch, vector_batch

RECOMPUTED = Checkpointing(mode="full", blocks=("blocks.0", "blocks.1", "blocks.2"))


class Matrices(nn.Module):
    """Large products of matrices and little else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(2)), nn.Linear(4096, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.fixture(scope="module")
def matrices() -> StepPredictor:
    """On meta: nothing of it has values."""
    with torch.device("meta"):
        model = Matrices()
    batch = (torch.empty(4, 4096), torch.zeros(4, dtype=torch.long))
    return StepPredictor(model, batch, gpu="A100 80GB")


@pytest.fixture(scope="module")
def convolutions() -> StepPredictor:
    """A small CNN whose blocks can be recomputed."""
    return StepPredictor(ConvNet(), image_batch(), gpu="A100 80GB")


def candidate(
    size: int, steps: int, precision: Precision = "float32", checkpointing: Checkpointing | None = None
) -> Candidate:
    """One candidate of `size` × `steps` samples."""
    return Candidate(
        micro_batch_size=size,
        accumulation_steps=steps,
        precision=precision,
        checkpointing=checkpointing or Checkpointing(),
    )


def test_a_known_product_takes_what_it_takes_by_hand() -> None:
    """8192³ in bfloat16 on an A100: 1.1e12 operations at 0.75 × 312e12 a second are 4.7 ms, not seconds."""
    operation = Operation(2 * 8192**3, 3 * 2 * 8192**2, torch.bfloat16)
    (seconds,) = operator_seconds(Tally.of([operation]), find_gpu("A100 80GB"), precision="bfloat16")
    assert seconds == pytest.approx(2 * 8192**3 / (MATRIX_SHARE * 312e12) + LAUNCH_SECONDS)
    assert 4e-3 < seconds < 6e-3


def test_what_moves_much_and_computes_little_waits_for_memory() -> None:
    """2 GB at 0.8 × 2039 GB/s."""
    (seconds,) = operator_seconds(
        Tally.of([Operation(0, 2e9, torch.float32)]), find_gpu("A100 80GB"), precision="float32"
    )
    assert seconds == pytest.approx(2 / (0.8 * 2039), rel=0.01)


def test_the_traced_products_are_counted(matrices: StepPredictor) -> None:
    """Forward and both gradients of every layer, but the first layer's inputs need none: 2 × samples × weights each."""
    matrices.step_seconds(candidate(3, 2), samples=6)
    known = matrices._work(candidate(3, 2), 6)
    square, last = 4096 * 4096, 4096 * 10
    assert known.micro_step.operations.sum() == 2 * 3 * (5 * square + 3 * last)
    assert known.optimizer_step.operations.sum() == 0


def test_lower_precision_is_faster_where_matrices_are(matrices: StepPredictor) -> None:
    """On a GPU with tensor cores: bfloat16 before TF32 before float32."""
    seconds = [
        matrices.step_seconds(candidate(4096, 2, precision), samples=8192)
        for precision in ("bfloat16", "tf32", "float32")
    ]
    assert seconds == sorted(seconds)
    assert seconds[2] > 2 * seconds[0]


def test_recomputing_takes_longer(convolutions: StepPredictor) -> None:
    """At the same split, whatever its size."""
    for size in (4, 64):
        plain = convolutions.step_seconds(candidate(size, 2), samples=2 * size)
        assert convolutions.step_seconds(candidate(size, 2, checkpointing=RECOMPUTED), samples=2 * size) > plain


def test_larger_micro_batches_are_not_slower(convolutions: StepPredictor) -> None:
    """Fewer launches for the same work."""
    seconds = [convolutions.step_seconds(candidate(64 // steps, steps), samples=64) for steps in (1, 2, 4, 8, 16)]
    assert seconds == sorted(seconds)


def test_work_is_affine_in_the_samples(convolutions: StepPredictor) -> None:
    """What lies between and beyond two traced sizes is what a trace of that size counts."""
    convolutions.step_seconds(candidate(16, 2), samples=32)
    convolutions._traces.step("float32", Checkpointing(), 16)
    made = convolutions._traces.made("float32", Checkpointing())
    known = {samples: traced.work for samples, traced in made.items()}
    on_line = work_at(16, (3, known[3]), (5, known[5]))
    ours, theirs = on_line.micro_step, known[16].micro_step
    assert ours.dtypes == theirs.dtypes
    assert ours.operations == pytest.approx(theirs.operations)
    assert ours.moved_bytes == pytest.approx(theirs.moved_bytes, rel=1e-6)


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize(("model", "batch"), [(ConvNet(), image_batch()), (Wide(), vector_batch())])
def test_one_micro_batch_cut_out_of_two_is_the_one_traced_alone(
    model: nn.Module, batch: object, precision: Precision
) -> None:
    """A step without accumulation needs what a trace of just that needs, to the byte."""
    predictor = StepPredictor(model, batch, gpu="A100 80GB")
    alone = trace_step(predictor.subject, candidate(3, 1, precision))
    cut = without_second(trace_step(predictor.subject, candidate(3, 2, precision)))
    assert replay(allocator_events(SizedTrace(cut, cut.sizes))) == replay(
        allocator_events(SizedTrace(alone, alone.sizes))
    )
