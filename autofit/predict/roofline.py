"""Seconds of a step on a GPU of the catalogue, from the work that its trace counts: to order candidates by, no more.

An operator takes as long as its arithmetic or its memory traffic, whichever is slower (Williams, Waterman and Patterson
2009, "Roofline"), and its launch. Nothing here is a measurement.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from autofit.candidate import Candidate, Checkpointing, Precision
from autofit.gpus import Gpu, find_gpu
from autofit.memory import fit_threshold, replay
from autofit.predict.line import SIZES, Line, SizedTrace
from autofit.predict.observed import observed_blocks
from autofit.predict.prediction import allocator_events
from autofit.predict.predictor import Predictor
from autofit.predict.recorder import Trace
from autofit.predict.tracing import trace_step
from autofit.predict.work import Operation, Work, WorkLog, work_at
from autofit.step.blocks import Blocks
from autofit.timing import Round

# Of the vendor's dense rate; torch's own roofline takes the same share (`torch.utils._runtime_estimation`).
MATRIX_SHARE = 0.75
# Of the vendor's bandwidth: what plain copies of large tensors reach; kernels that reduce reach less.
BANDWIDTH_SHARE = 0.8
# An operator without work: to launch a kernel takes a few microseconds, and eager PyTorch hides them only in part.
LAUNCH_SECONDS = 5e-6


def operator_seconds(operation: Operation, gpu: Gpu, *, precision: Precision) -> float:
    """Seconds of one operator on `gpu`; `precision` says whether float32 products may run in TF32."""
    compute = operation.operations / (_rate(operation.dtype, gpu, precision) * MATRIX_SHARE)
    memory = operation.moved_bytes / (gpu.bandwidth * BANDWIDTH_SHARE)
    return max(compute, memory) + LAUNCH_SECONDS


def step_seconds(work: Work, gpu: Gpu, *, precision: Precision, accumulation_steps: int) -> float:
    """Seconds of a whole optimizer step: accumulation_steps × micro-step + optimizer step, as trials are composed."""

    def total(operations: Iterable[Operation]) -> float:
        return sum(operator_seconds(operation, gpu, precision=precision) for operation in operations)

    once = Round(1, total(work.micro_step), total(work.optimizer_step))
    return once.step_seconds(accumulation_steps)


def _rate(dtype: torch.dtype | None, gpu: Gpu, precision: Precision) -> float:
    """Operations per second; a dtype that the GPU has no units for runs, if at all, at the rate of float32."""
    rates = {torch.bfloat16: gpu.bfloat16, torch.float16: gpu.float16}
    if precision == "tf32":
        rates[torch.float32] = gpu.tf32
    return (rates.get(dtype) if dtype is not None else None) or gpu.float32


_Key = tuple[Precision, Checkpointing, int]


class StepPredictor(Predictor):
    """Predicts for a GPU of the catalogue whether candidates fit and how long they take, from the same traces.

    `options` as those of `Predictor`. TF32 needs what float32 needs, so both share their traces.
    """

    def __init__(self, model: nn.Module, sample_batch: Any, *, gpu: str, **options: Any) -> None:
        super().__init__(model, sample_batch, gpu=gpu, **options)
        self.gpu = find_gpu(gpu)
        self._work: defaultdict[_Key, dict[int, Work]] = defaultdict(dict)

    def step_seconds(self, candidate: Candidate, *, samples: int) -> float:
        """Seconds of an optimizer step of `samples`: its micro-batches together are `samples`, however they differ."""
        sizes = candidate.split(samples)
        self._sized(candidate, samples)
        known = self._work[self._key(candidate)]
        if sizes[0] in known:
            work = known[sizes[0]]
        else:
            low, high = ((size, known[size]) for size in SIZES)
            work = work_at(samples / len(sizes), low, high)
        return step_seconds(work, self.gpu, precision=candidate.precision, accumulation_steps=len(sizes))

    def reserved_peak(self, candidate: Candidate, *, samples: int) -> int:
        """Bytes that the allocator would reserve at most, if nothing held it back."""
        return replay(allocator_events(self._sized(candidate, samples))).peak_reserved_bytes

    def fits(self, candidate: Candidate, *, samples: int, cap_bytes: int) -> bool:
        """Whether the step runs through under a cap on the allocator."""
        return replay(allocator_events(self._sized(candidate, samples)), cap_bytes).fits

    def needed_bytes(self, candidate: Candidate, *, samples: int) -> int:
        """The smallest cap on the allocator under which the step runs through."""
        return fit_threshold(allocator_events(self._sized(candidate, samples)))

    def needed_at_least_bytes(self, candidate: Candidate, *, samples: int) -> int:
        """A bound for a candidate of one micro-batch, from the traces of accumulation, which are at hand.

        A second micro-batch as large differs by the gradients of the first, which are no more than the parameters.
        """
        accumulating = candidate.model_copy(update={"accumulation_steps": 2})
        gradients = sum(2 * parameter.nbytes for parameter in self._subject.model.parameters())
        return max(self.needed_bytes(accumulating, samples=2 * samples) - gradients, 0)

    def observed_blocks(self, blocks: Blocks) -> Blocks:
        """Those of `blocks` that can be recomputed, seen in one micro-step without values."""
        return observed_blocks(self._subject, blocks)

    def _sized(self, candidate: Candidate, samples: int) -> SizedTrace:
        sizes = candidate.split(samples)
        return self._line(candidate).at(sizes[0], sizes[min(1, len(sizes) - 1)])

    def _key(self, candidate: Candidate) -> _Key:
        precision: Precision = "float32" if candidate.precision == "tf32" else candidate.precision
        return precision, candidate.checkpointing, min(candidate.accumulation_steps, 2)

    def _line(self, candidate: Candidate) -> Line:
        return super()._line(candidate.model_copy(update={"precision": self._key(candidate)[0]}))

    def _trace(self, key: _Key, samples: int) -> Trace:
        precision, checkpointing, steps = key
        candidate = Candidate(
            micro_batch_size=samples, accumulation_steps=steps, precision=precision, checkpointing=checkpointing
        )
        log = WorkLog(self._device)
        trace = trace_step(self._subject, candidate, watch=log)
        self._work[key][samples] = log.work(trace)
        return trace
