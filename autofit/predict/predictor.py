"""Whether a candidate fits, in milliseconds and without a device: a few traces answer every micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from autofit.batch import infer_layout
from autofit.candidate import Candidate, Checkpointing, Precision
from autofit.errors import ConfigError
from autofit.gpus import Capability, find_gpu
from autofit.predict.calibration import learn_scratch
from autofit.predict.line import SIZES, Line, SizedTrace
from autofit.predict.observed import observed_blocks
from autofit.predict.prediction import MemoryPrediction, describe
from autofit.predict.recorder import Trace
from autofit.predict.scratch import CUDA_CONTEXT_BYTES, Learned, OperatorKey
from autofit.predict.shadow import OptimizerLike
from autofit.predict.tracing import Subject, trace_step
from autofit.step.accumulation import LossOptions
from autofit.step.blocks import Blocks

# A GPU of which nothing is said: today's commonest, Ampere and Ada.
_DEFAULT_CAPABILITY: Capability = (8, 0)
_KINDS = ("cuda", "cpu")
_CUDA_BLIND_SPOT = "memory that cuDNN takes inside a convolution is not in it"
_CPU_BLIND_SPOT = "memory inside operators is not in it, as it is not in the tracked measurement either"
_LEARNED = (
    f"memory inside operators was learned from micro-batches of {' and '.join(map(str, SIZES))} samples; with others a "
    "library may choose other kernels"
)

_LineKey = tuple[Precision, Checkpointing, int]


class Predictor:
    """Predicts what candidates need for one model, batch, loss and optimizer on one device.

    Arguments as in `autofit.tune`. `device` is `"cuda"` or `"cpu"`, whether it is there or not; `gpu` names a GPU of
    the catalogue (`autofit.gpus`) whose kernels are chosen. The model may lie on `meta`. Nothing is copied, and
    afterwards the model is what it was.

    `calibrate` runs two small micro-steps of each precision and checkpointing for real, on a model that lies on
    `device` with its values, and so learns what operators take for themselves while they run.
    """

    def __init__(
        self,
        model: nn.Module,
        sample_batch: Any,
        *,
        loss_fn: Callable[..., Any] | None = None,
        compute_loss: Callable[..., Any] | None = None,
        loss_weight: Callable[[Any], Any] | Literal["samples", "sum"] | None = None,
        optimizer: OptimizerLike = None,
        device: str | torch.device = "cuda",
        gpu: str | None = None,
        batch_dims: Any = None,
        max_grad_norm: float | None = None,
        calibrate: bool = False,
    ) -> None:
        self._device = _traced_device(device, gpu)
        options = LossOptions(
            loss_fn=loss_fn, compute_loss=compute_loss, loss_weight=loss_weight, batch_dims=batch_dims
        )
        self._subject = Subject(
            model=model,
            sample_batch=sample_batch,
            layout=infer_layout(sample_batch, batch_dims=batch_dims),
            optimizer=optimizer,
            device=self._device,
            capability=_capability(self._device, gpu),
            step_options=options,
            max_grad_norm=max_grad_norm,
        )
        self._calibrate = calibrate
        self._learned: dict[OperatorKey, int] = {}
        self._calibrated: set[tuple[Precision, Checkpointing]] = set()
        self._lines: dict[_LineKey, Line] = {}

    def predict(self, candidate: Candidate, *, samples: int | None = None) -> MemoryPrediction:
        """What `candidate` needs for an optimizer step of `samples` (by default all its micro-batches are full).

        The first candidate of a precision and checkpointing takes a few traces, every other one milliseconds. Raises
        UntraceableError, for that line at once from then on, when the step needs values or the device.
        """
        cuda = self._device.type == "cuda"
        sized, line = self.sized(candidate, samples=samples), self._line(candidate)
        return describe(
            sized,
            candidate=candidate,
            device=str(self._device),
            context_bytes=CUDA_CONTEXT_BYTES if cuda else 0,
            notes=(*self._blind_spots(), *line.notes),
        )

    def sized(self, candidate: Candidate, *, samples: int | None = None) -> SizedTrace:
        """What `predict` reads its answer off: births and deaths of storages, and their bytes."""
        sizes = candidate.split(samples or candidate.micro_batch_size * candidate.accumulation_steps)
        return self._line(candidate).at(sizes[0], sizes[min(1, len(sizes) - 1)])

    def observed_blocks(self, blocks: Blocks) -> Blocks:
        """Those of `blocks` that can be recomputed, seen in one micro-step without values."""
        return observed_blocks(self._subject, blocks)

    def _blind_spots(self) -> tuple[str, ...]:
        if self._calibrate:
            return (_LEARNED,)
        return (_CUDA_BLIND_SPOT,) if self._device.type == "cuda" else (_CPU_BLIND_SPOT,)

    def _line(self, candidate: Candidate) -> Line:
        key = candidate.precision, candidate.checkpointing, min(candidate.accumulation_steps, 2)
        if key not in self._lines:
            self._lines[key] = Line(partial(self._trace, key))
        return self._lines[key]

    def _trace(self, key: _LineKey, samples: int) -> Trace:
        precision, checkpointing, steps = key
        candidate = Candidate(
            micro_batch_size=samples, accumulation_steps=steps, precision=precision, checkpointing=checkpointing
        )
        return trace_step(self._subject, candidate, learned=self._learn(candidate))

    def _learn(self, candidate: Candidate) -> Learned | None:
        """What operators take inside, with the sizes that lines are traced at."""
        if not self._calibrate:
            return None
        if (kind := (candidate.precision, candidate.checkpointing)) not in self._calibrated:
            self._learned.update(learn_scratch(self._subject, candidate, SIZES))
            self._calibrated.add(kind)
        return self._learned


def predict_memory(
    model: nn.Module,
    sample_batch: Any,
    candidate: Candidate,
    *,
    loss_fn: Callable[..., Any] | None = None,
    compute_loss: Callable[..., Any] | None = None,
    loss_weight: Callable[[Any], Any] | Literal["samples", "sum"] | None = None,
    optimizer: OptimizerLike = None,
    device: str | torch.device = "cuda",
    gpu: str | None = None,
    batch_dims: Any = None,
    max_grad_norm: float | None = None,
    calibrate: bool = False,
) -> MemoryPrediction:
    """Predicts what one candidate needs, from traces of its training step without values; see `Predictor`.

    Raises UntraceableError when the step needs values or the device, ConfigError for arguments that cannot be meant.
    """
    predictor = Predictor(
        model,
        sample_batch,
        loss_fn=loss_fn,
        compute_loss=compute_loss,
        loss_weight=loss_weight,
        optimizer=optimizer,
        device=device,
        gpu=gpu,
        batch_dims=batch_dims,
        max_grad_norm=max_grad_norm,
        calibrate=calibrate,
    )
    return predictor.predict(candidate)


def _traced_device(device: str | torch.device, gpu: str | None) -> torch.device:
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
        wanted = torch.device("meta")
    if wanted.type not in _KINDS or (gpu is not None and wanted.type != "cuda"):
        raise ConfigError(
            f"device={device!r}, gpu={gpu!r} cannot be predicted. Allowed: 'cpu' without a gpu, or 'cuda' with or "
            "without one from the catalogue."
        )
    return torch.device("cuda", wanted.index or 0) if wanted.type == "cuda" else torch.device("cpu")


def _capability(device: torch.device, gpu: str | None) -> Capability:
    if gpu is not None:
        return find_gpu(gpu).capability
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_capability(device)
    return _DEFAULT_CAPABILITY
