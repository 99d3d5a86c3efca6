"""Memory and seconds of whole steps on a GPU of the catalogue."""

from __future__ import annotations

from typing import Any

from torch import nn

from autofit.candidate import Candidate, Checkpointing
from autofit.memory import Peaks, fit_threshold, replay
from autofit.predict.line import SIZES
from autofit.predict.prediction import allocator_events
from autofit.predict.predictor import Predictor
from autofit.predict.roofline import step_seconds
from autofit.predict.traces import shared_precision
from autofit.predict.work import Work, work_at


class StepPredictor(Predictor):
    """Predicts whether candidates fit on `gpu` and how long they take; `options` as those of `Predictor`."""

    def __init__(self, model: nn.Module, sample_batch: Any, *, gpu: str, **options: Any) -> None:
        super().__init__(model, sample_batch, gpu=gpu, **options)
        self._peaks: dict[tuple[Candidate, int, int], Peaks] = {}

    def step_seconds(self, candidate: Candidate, *, samples: int) -> float:
        """Seconds of an optimizer step of `samples`; of its micro-batches, the mean size counts."""
        sizes = candidate.split(samples)
        mean = samples / len(sizes)
        masks = self._mixed(candidate)
        plain = candidate if masks is None else candidate.model_copy(update={"checkpointing": Checkpointing()})
        seconds = step_seconds(
            self._work(plain, samples), self._gpu, precision=candidate.precision, accumulation_steps=len(sizes)
        )
        if masks is not None:
            seconds += len(sizes) * masks.cost(candidate.checkpointing.modes, mean, self._clock(candidate))
        return seconds

    def peaks(self, candidate: Candidate, *, samples: int, cap_bytes: int) -> Peaks:
        """What the step of `samples` reaches under a cap on the allocator, and whether it runs through."""
        key = candidate.model_copy(update={"precision": shared_precision(candidate.precision)}), samples, cap_bytes
        if key not in self._peaks:
            self._peaks[key] = replay(allocator_events(self._sized(candidate, samples)[0]), cap_bytes)
        return self._peaks[key]

    def needed_bytes(self, candidate: Candidate, *, samples: int) -> int:
        """The smallest cap on the allocator under which the step of `samples` runs through."""
        return fit_threshold(allocator_events(self._sized(candidate, samples)[0]))

    def _work(self, candidate: Candidate, samples: int) -> Work:
        sizes = candidate.split(samples)
        self._sized(candidate, samples)
        known = {
            size: traced.log.work(traced.trace)
            for size, traced in self._traces.made(candidate.precision, candidate.checkpointing).items()
        }
        if sizes[0] in known:
            return known[sizes[0]]
        low, high = ((size, known[size]) for size in SIZES)
        return work_at(samples / len(sizes), low, high)
