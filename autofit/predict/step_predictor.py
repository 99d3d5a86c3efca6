"""Memory and seconds of whole steps on a GPU of the catalogue, from as few traces as can be."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import nn

from autofit.candidate import Candidate, Checkpointing, Precision
from autofit.gpus import find_gpu
from autofit.memory import Peaks, fit_threshold, replay
from autofit.predict.line import SIZES, SizedTrace
from autofit.predict.prediction import allocator_events
from autofit.predict.predictor import Predictor
from autofit.predict.recorder import Trace
from autofit.predict.roofline import step_seconds
from autofit.predict.splice import without_second
from autofit.predict.tracing import trace_step
from autofit.predict.work import Work, WorkLog, work_at

_Kind = tuple[Precision, Checkpointing]
_LineKey = tuple[Precision, Checkpointing, int]


class StepPredictor(Predictor):
    """Predicts whether candidates fit on `gpu` and how long they take; `options` as those of `Predictor`.

    TF32 needs the memory that float32 needs, and a step without accumulation is part of one that accumulates: they
    share their traces.
    """

    def __init__(self, model: nn.Module, sample_batch: Any, *, gpu: str, **options: Any) -> None:
        super().__init__(model, sample_batch, gpu=gpu, **options)
        self._gpu = find_gpu(gpu)
        self._traces: dict[tuple[_Kind, int], Trace] = {}
        self._work: defaultdict[_Kind, dict[int, Work]] = defaultdict(dict)
        self._peaks: dict[tuple[Candidate, int, int], Peaks] = {}

    def step_seconds(self, candidate: Candidate, *, samples: int) -> float:
        """Seconds of an optimizer step of `samples`; of its micro-batches, the mean size counts."""
        sizes = candidate.split(samples)
        self._sized(candidate, samples)
        known = self._work[_kind(candidate)]
        if sizes[0] in known:
            work = known[sizes[0]]
        else:
            low, high = ((size, known[size]) for size in SIZES)
            work = work_at(samples / len(sizes), low, high)
        return step_seconds(work, self._gpu, precision=candidate.precision, accumulation_steps=len(sizes))

    def peaks(self, candidate: Candidate, *, samples: int, cap_bytes: int) -> Peaks:
        """What the step of `samples` reaches under a cap on the allocator, and whether it runs through."""
        key = _sharing(candidate), samples, cap_bytes
        if key not in self._peaks:
            self._peaks[key] = replay(allocator_events(self._sized(candidate, samples)), cap_bytes)
        return self._peaks[key]

    def needed_bytes(self, candidate: Candidate, *, samples: int) -> int:
        """The smallest cap on the allocator under which the step of `samples` runs through."""
        return fit_threshold(allocator_events(self._sized(candidate, samples)))

    def _sized(self, candidate: Candidate, samples: int) -> SizedTrace:
        return self.sized(_sharing(candidate), samples=samples)

    def _trace(self, key: _LineKey, samples: int) -> Trace:
        precision, checkpointing, steps = key
        candidate = Candidate(
            micro_batch_size=samples, accumulation_steps=2, precision=precision, checkpointing=checkpointing
        )
        kind = _kind(candidate)
        if (kind, samples) not in self._traces:
            log = WorkLog(self._device)
            trace = trace_step(self._subject, candidate, watch=log, learned=self._learn(candidate))
            self._traces[kind, samples] = trace
            self._work[kind][samples] = log.work(trace)
        trace = self._traces[kind, samples]
        return trace if steps == 2 else without_second(trace)


def _sharing(candidate: Candidate) -> Candidate:
    """The candidate whose memory this one shares."""
    return candidate.model_copy(update={"precision": _kind(candidate)[0]})


def _kind(candidate: Candidate) -> _Kind:
    return "float32" if candidate.precision == "tf32" else candidate.precision, candidate.checkpointing
