"""What tune() knows of a candidate before it tries it: predicted memory, or why there is no prediction."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from autofit.candidate import Candidate, CheckpointingMode, Parallelism, Precision
from autofit.hindsight import allowed_seconds, insight
from autofit.insight import Insight
from autofit.oom import guarded
from autofit.plan import Trial
from autofit.predict import MemoryPrediction, Predictor, UntraceableError
from autofit.step.blocks import Blocks

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Foresight:
    """Predictions of one tuning. Where the step cannot be traced it has none, and `notes` say what stopped it.

    `predictor` is None for devices that cannot be predicted, `cap_bytes` is the cap on the allocator and
    `bucket_bytes` what gradients take where ranks exchange them. After `deadline`,
    by the monotonic clock, nothing new is predicted or solved.
    """

    def __init__(
        self,
        predictor: Predictor | None,
        *,
        samples: int,
        cap_bytes: int,
        bucket_bytes: int = 0,
        deadline: float | None = None,
    ) -> None:
        self._predictor = predictor
        self._samples = samples
        self._cap = cap_bytes
        self._bucket_bytes = bucket_bytes
        self._deadline = math.inf if deadline is None else deadline
        self._needed: dict[Candidate, int | None] = {}
        self._solved: dict[Candidate, Candidate] = {}
        self._obstacles: dict[str, None] = {}
        self._blocks = Blocks((), "none are followed")
        self._began = time.monotonic()

    def has(self, candidate: Candidate) -> bool:
        """Whether `needed_bytes` answers at once."""
        return self._predictor is None or candidate in self._needed

    def needed_bytes(self, candidate: Candidate) -> int | None:
        """The smallest cap under which the candidate should not run out; None where that is unknown."""
        if candidate not in self._needed:
            if time.monotonic() >= self._deadline:
                return None
            needed = self._ask(
                candidate, lambda predictor: predictor.needed_bytes(_alone(candidate), samples=self._samples)
            )
            self._needed[candidate] = None if needed is None else needed + self._beside(candidate)
        return self._needed[candidate]

    def watch(self, blocks: Blocks) -> Blocks:
        """The blocks, with those that may keep their products, as one micro-step without values shows."""
        if self._predictor is None or not blocks.names:
            return blocks
        predictor = self._predictor
        seen, failure = guarded(lambda: predictor.observed_blocks(blocks))
        if seen is None:
            logger.info("blocks could not be watched: %s", failure.message if failure else "")
            return blocks
        return replace(blocks, selective=tuple(name for name in blocks.names if name in seen.selective))

    def follow(self, blocks: Blocks) -> None:
        """From now on masks over the blocks can be solved."""
        self._blocks = blocks
        if self._predictor is not None:
            self._predictor.follow(blocks)

    def solved(self, candidate: Candidate, *, cap_bytes: int | None, modes: Collection[CheckpointingMode]) -> Candidate:
        """The candidate with the least recomputation that should fit; itself where none is known."""
        if self._predictor is None or cap_bytes is None or not modes or candidate.checkpointing.mode == "none":
            return candidate
        if candidate not in self._solved:
            if time.monotonic() >= self._deadline:
                return candidate
            modes = {*modes, candidate.checkpointing.mode}
            left = cap_bytes - self._beside(candidate)
            solve = partial(self._predictor.solve, samples=self._samples, cap_bytes=left, modes=modes)
            found, failure = guarded(lambda: solve(_alone(candidate)))
            if failure is not None:
                logger.info("no mask was found for %s: %s", candidate, failure.message)
            together = {"parallelism": candidate.parallelism}
            self._solved[candidate] = found.model_copy(update=together) if found else candidate
        return self._solved[candidate]

    def _beside(self, candidate: Candidate) -> int:
        """Bytes of gradient buckets that one rank on its own would not have; those of accumulated gradients it has."""
        return self._bucket_bytes if candidate.parallelism.mode == "ddp" and candidate.accumulation_steps == 1 else 0

    def insight(self, best: Candidate, *, half: Precision) -> Insight | None:
        """What the plan should say of the step that won; None where nothing, or not the whole, can be predicted."""
        if self._predictor is None or self._obstacles or best.parallelism.mode != "none":
            return None
        now = time.monotonic()
        return insight(
            self._predictor,
            best,
            samples=self._samples,
            blocks=self._blocks,
            half=half,
            seconds=min(allowed_seconds(now - self._began), self._deadline - now),
        )

    def bottleneck(self, candidate: Candidate) -> str:
        """What takes the candidate's memory, as predicted; empty where that is unknown."""
        prediction: MemoryPrediction | None = self._ask(
            candidate, lambda predictor: predictor.predict(_alone(candidate), samples=self._samples)
        )
        return f" Predicted: {prediction.bottleneck}" if prediction else ""

    def annotate(self, trial: Trial) -> Trial:
        """The trial with the reserved peak predicted under the cap; where it should not fit, with what it needs."""
        candidate = trial.candidate
        beside = self._beside(candidate)
        left = self._cap - beside
        peaks = self._ask(
            candidate, lambda predictor: predictor.peaks(_alone(candidate), samples=self._samples, cap_bytes=left)
        )
        if peaks is None:
            return trial
        predicted = peaks.peak_reserved_bytes + beside if peaks.fits else self.needed_bytes(candidate)
        return trial.model_copy(update={"predicted_peak_bytes": predicted})

    def notes(self, trials: Sequence[Trial]) -> tuple[str, ...]:
        """The error of the predictions over the trials that were measured, and what could not be predicted."""
        errors = [
            abs(trial.predicted_peak_bytes / trial.peak_reserved_bytes - 1)
            for trial in trials
            if trial.feasible and trial.predicted_peak_bytes and trial.peak_reserved_bytes
        ]
        found = [f"Memory could not be predicted and was found by trying: {obstacle}." for obstacle in self._obstacles]
        if errors:
            found.append(
                f"Predicted peaks were off by {statistics.median(errors):.1%} (median) and {max(errors):.1%} (largest) "
                f"over {len(errors)} measured trials."
            )
        return tuple(found)

    def _ask(self, candidate: Candidate, question: Callable[[Predictor], T]) -> T | None:
        """A prediction is a help and never a condition: whatever stops it, trials go on without."""
        predictor = self._predictor
        if predictor is None:
            return None
        answer, failure = guarded(lambda: question(predictor))
        if failure is not None:
            known = isinstance(failure.error, UntraceableError)
            self._obstacles.setdefault(str(failure.error) if known else failure.message)
            logger.info("no prediction for %s: %s", candidate, failure.message)
        return answer


def _alone(candidate: Candidate) -> Candidate:
    """The candidate as one process would run it, which is what can be traced."""
    return candidate.model_copy(update={"parallelism": Parallelism()})
