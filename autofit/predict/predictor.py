"""Whether a candidate fits, in milliseconds and without a device: a few traces answer every micro-batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from autofit.batch import infer_layout
from autofit.candidate import Candidate, Checkpointing, CheckpointingMode, Precision
from autofit.errors import ConfigError
from autofit.gpus import Capability, find_gpu
from autofit.insight import BlockEffect, StepMemory
from autofit.memory import Peaks, fit_threshold, replay
from autofit.predict.effects import block_effects
from autofit.predict.line import SIZES, Line, SizedTrace
from autofit.predict.masks import Masks
from autofit.predict.observed import observed_blocks
from autofit.predict.occupancy import step_memory
from autofit.predict.prediction import MemoryPrediction, allocator_events, describe
from autofit.predict.recorder import Trace
from autofit.predict.roofline import REFERENCES, operator_seconds
from autofit.predict.scratch import CUDA_CONTEXT_BYTES
from autofit.predict.shadow import OptimizerLike
from autofit.predict.solver import Floats
from autofit.predict.splice import without_second
from autofit.predict.traces import Traced, Traces, shared_precision
from autofit.predict.tracing import Subject
from autofit.predict.weave import WeaveError
from autofit.predict.work import Tally
from autofit.step.accumulation import LossOptions
from autofit.step.blocks import Blocks

logger = logging.getLogger(__name__)

# A GPU of which nothing is said: today's commonest, Ampere and Ada.
_DEFAULT_CAPABILITY: Capability = (8, 0)
_KINDS = ("cuda", "cpu")
_CUDA_BLIND_SPOT = "memory that cuDNN takes inside a convolution is not in it"
_CPU_BLIND_SPOT = "memory inside operators is not in it, as it is not in the tracked measurement either"
_LEARNED = (
    f"memory inside operators was learned from micro-batches of {' and '.join(map(str, SIZES))} samples; with others a "
    "library may choose other kernels"
)

_Kind = tuple[Precision, Checkpointing]


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
        self.subject = Subject(
            model=model,
            sample_batch=sample_batch,
            layout=infer_layout(sample_batch, batch_dims=batch_dims),
            optimizer=optimizer,
            device=self._device,
            capability=_capability(self._device, gpu),
            step_options=options,
            max_grad_norm=max_grad_norm,
        )
        self._gpu = find_gpu(gpu) if gpu is not None else REFERENCES[self._device.type]
        self._calibrate = calibrate
        self._traces = Traces(self.subject, calibrate=calibrate)
        self._lines: dict[_Kind, Line] = {}
        self._cut: dict[int, tuple[Trace, Trace]] = {}
        self._masks: dict[tuple[Precision, bool], Masks | None] = {}
        self._selective: tuple[str, ...] = ()

    def predict(self, candidate: Candidate, *, samples: int | None = None) -> MemoryPrediction:
        """What `candidate` needs for an optimizer step of `samples` (by default all its micro-batches are full).

        The first candidate of a precision and checkpointing takes a few traces, every other one milliseconds. Raises
        UntraceableError, for that line at once from then on, when the step needs values or the device.
        """
        sized, notes = self._sized(candidate, samples)
        return describe(
            sized,
            candidate=candidate,
            device=str(self._device),
            context_bytes=CUDA_CONTEXT_BYTES if self.on_cuda else 0,
            notes=(self._blind_spot(), *notes),
        )

    def sized(self, candidate: Candidate, *, samples: int | None = None) -> SizedTrace:
        """What `predict` reads its answer off: births and deaths of storages, and their bytes."""
        return self._sized(candidate, samples)[0]

    def peaks(self, candidate: Candidate, *, samples: int | None = None, cap_bytes: int | None = None) -> Peaks:
        """What the step reaches under a cap on the allocator, and whether it runs through: less than `predict` says."""
        return replay(allocator_events(self.sized(candidate, samples=samples)), cap_bytes)

    def needed_bytes(self, candidate: Candidate, *, samples: int | None = None) -> int:
        """The smallest cap on the allocator under which the step runs through; it takes several replays to find."""
        return fit_threshold(allocator_events(self.sized(candidate, samples=samples)))

    def observed_blocks(self, blocks: Blocks) -> Blocks:
        """Those of `blocks` that can be recomputed, and selectively, seen in one micro-step without values."""
        return observed_blocks(self.subject, blocks)

    def follow(self, blocks: Blocks) -> None:
        """From now on masks over `blocks` are predicted from one trace per mode."""
        self._traces.blocks, self._selective = blocks.names, blocks.selective
        self._masks.clear()

    def solve(
        self, candidate: Candidate, *, samples: int, cap_bytes: int, modes: Collection[CheckpointingMode]
    ) -> Candidate | None:
        """The candidate with the least recomputation that fits under `cap_bytes`, by blocks that were `follow`ed.

        Each block is in one of `modes`, or in `none`. None when nothing was found that fits, or where the traces of the
        modes cannot be put together. Raises UntraceableError as `predict` does.
        """
        masks = self.masks(candidate.precision, offload="offload" in modes)
        if masks is None:
            return None
        mask = masks.solve(candidate.split(samples), cap_bytes, self._clock(candidate), modes=modes)
        return None if mask is None else candidate.model_copy(update={"checkpointing": Checkpointing.of(mask)})

    def step_memory(self, candidate: Candidate, *, samples: int) -> StepMemory:
        """What is in use over an optimizer step of `samples`, part by part."""
        return step_memory(self.sized(candidate, samples=samples), candidate)

    def block_effects(self, candidate: Candidate, *, samples: int) -> tuple[BlockEffect, ...]:
        """What recomputing each of the blocks that were `follow`ed would save and cost; none where that is unknown."""
        masks = self.masks(candidate.precision, offload=False)
        if masks is None or "offload" in candidate.checkpointing.modes.values():
            return ()
        return block_effects(masks, candidate, candidate.split(samples), self._clock(candidate))

    @property
    def trace_seconds(self) -> float:
        """How long a trace takes, as far as is known."""
        return self._traces.seconds

    @property
    def on_cuda(self) -> bool:
        """Whether the device that is predicted has CUDA's allocator and a host beside it."""
        return self._device.type == "cuda"

    def knows(self, candidate: Candidate) -> bool:
        """Whether the candidate is answered in milliseconds, without a new trace."""
        return (shared_precision(candidate.precision), candidate.checkpointing) in self._lines

    def knows_masks(self, precision: Precision) -> bool:
        """Whether masks in this precision are answered without a new trace."""
        return (shared_precision(precision), False) in self._masks

    def _clock(self, candidate: Candidate) -> Callable[[Tally], Floats]:
        return partial(operator_seconds, gpu=self._gpu, precision=candidate.precision)

    def _mixed(self, candidate: Candidate) -> Masks | None:
        """The masks that know the candidate's, where it has no trace of its own: all blocks in one mode."""
        modes = candidate.checkpointing.modes
        blocks = set(self._traces.blocks)
        uniform = modes.keys() == blocks and len(set(modes.values())) == 1
        if not modes or not modes.keys() <= blocks or uniform:
            return None
        return self.masks(candidate.precision, offload="offload" in modes.values())

    def _blind_spot(self) -> str:
        if self._calibrate:
            return _LEARNED
        return _CUDA_BLIND_SPOT if self.on_cuda else _CPU_BLIND_SPOT

    def _sized(self, candidate: Candidate, samples: int | None) -> tuple[SizedTrace, tuple[str, ...]]:
        """The trace of the candidate's step, and what is to be said about it."""
        sizes = candidate.split(samples or candidate.micro_batch_size * candidate.accumulation_steps)
        masks = self._mixed(candidate)
        if masks is not None:
            return masks.at(candidate.checkpointing.modes, sizes), ()
        line = self._line(candidate)
        sized = line.at(sizes[0], sizes[min(1, len(sizes) - 1)])
        return (sized if len(sizes) > 1 else replace(sized, trace=self._alone(sized.trace))), line.notes

    def _alone(self, trace: Trace) -> Trace:
        """The step without accumulation, cut out of one that accumulates; kept, for all sizes of a line share it."""
        kept = self._cut.get(id(trace))
        if kept is None or kept[0] is not trace:
            kept = self._cut[id(trace)] = trace, without_second(trace)
        return kept[1]

    def _line(self, candidate: Candidate) -> Line:
        kind = shared_precision(candidate.precision), candidate.checkpointing
        if kind not in self._lines:
            self._lines[kind] = Line(partial(self._trace, kind))
        return self._lines[kind]

    def _trace(self, kind: _Kind, samples: int) -> Trace:
        return self._traces.step(*kind, samples).trace

    def masks(self, precision: Precision, *, offload: bool = False) -> Masks | None:
        """The masks over the blocks that are followed; None where there are none, or they cannot be put together."""
        key = shared_precision(precision), offload
        if key not in self._masks:
            self._masks[key] = self._put_together(*key) if self._traces.blocks else None
        return self._masks[key]

    def _put_together(self, precision: Precision, offload: bool) -> Masks | None:
        def traced(mode: CheckpointingMode) -> tuple[Traced, Traced]:
            checkpointing = Checkpointing.of(dict.fromkeys(self._traces.blocks, mode))
            few, many = (self._traces.step(precision, checkpointing, size, followed=True) for size in SIZES)
            return few, many

        modes: list[CheckpointingMode] = ["none", "full"]
        modes += ["selective"] if self._selective else []
        modes += ["offload"] if offload else []
        try:
            return Masks({mode: traced(mode) for mode in modes}, blocks=self._traces.blocks, selective=self._selective)
        except WeaveError as error:
            logger.info("masks of %s are traced one by one: %s", precision, error)
            return None


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
