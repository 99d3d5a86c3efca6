"""Memory and seconds of whole steps on a GPU of the catalogue."""

from __future__ import annotations

from typing import Any

from torch import nn

from autofit.candidate import Candidate, Checkpointing
from autofit.memory import Peaks
from autofit.predict.line import SIZES
from autofit.predict.predictor import Predictor
from autofit.predict.roofline import step_seconds
from autofit.predict.traces import shared_precision
from autofit.predict.work import Work, work_at


class StepPredictor(Predictor):
    """Predicts whether candidates fit on `gpu` and how long they take; `options` as those of `Predictor`."""

    def __init__(self, model: nn.Module, sample_batch: Any, *, gpu: str, **options: Any) -> None:
        super().__init__(model, sample_batch, gpu=gpu, **options)
        self._peaks: dict[tuple[Candidate, int | None, int | None], Peaks] = {}

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

    def peaks(self, candidate: Candidate, *, samples: int | None = None, cap_bytes: int | None = None) -> Peaks:
        """As of `Predictor`, kept."""
        key = candidate.model_copy(update={"precision": shared_precision(candidate.precision)}), samples, cap_bytes
        if key not in self._peaks:
            self._peaks[key] = super().peaks(candidate, samples=samples, cap_bytes=cap_bytes)
        return self._peaks[key]

    def _work(self, candidate: Candidate, samples: int) -> Work:
        sizes = candidate.split(samples)
        self.sized(candidate, samples=samples)
        known = {
            size: traced.work
            for size, traced in self._traces.made(candidate.precision, candidate.checkpointing).items()
        }
        if sizes[0] in known:
            return known[sizes[0]]
        low, high = ((size, known[size]) for size in SIZES)
        return work_at(samples / len(sizes), low, high)
