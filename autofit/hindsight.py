"""What a plan should say of the step that won: its memory, the naive step's, its blocks, and other ways to run it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from autofit.candidate import Candidate, Checkpointing, Precision, balanced
from autofit.insight import Alternative, Insight, StepMemory, Technique
from autofit.oom import guarded
from autofit.predict import Predictor
from autofit.step.blocks import Blocks

logger = logging.getLogger(__name__)

T = TypeVar("T")

# What a plan says of its step may take this share of what finding it took, and always so long.
SHARE = 0.1
LEAST_SECONDS = 0.5

# A line of candidates takes up to three traces; masks take two of each of three modes.
LINE_TRACES, MASK_TRACES = 3, 6


def allowed_seconds(took: float) -> float:
    """How long looking back may take after a search that took so long; both in seconds."""
    return max(LEAST_SECONDS, SHARE * took)


def insight(
    predictor: Predictor, best: Candidate, *, samples: int, blocks: Blocks, half: Precision, seconds: float
) -> Insight:
    """Predictions about `best`, as an optimizer step of `samples`; what takes longer than `seconds` is left out.

    `blocks` are those that may be recomputed, `half` the precision of 16 bits that the device is made for. What cannot
    be predicted is left out too: nothing is raised.
    """
    return _Hindsight(predictor, best, samples, blocks, half, time.monotonic() + seconds).insight()


@dataclass(frozen=True)
class _Hindsight:
    predictor: Predictor
    best: Candidate
    samples: int
    blocks: Blocks
    half: Precision
    deadline: float

    def insight(self) -> Insight:
        """The most telling first, for the time may not do for all."""
        best = self._memory(self.best)
        naive = self._memory(Candidate(micro_batch_size=self.samples, accumulation_steps=1))
        alternatives = [self._alternative(*changed) for changed in self._changed()]
        effects = None
        if self._affordable(0 if self.predictor.knows_masks(self.best.precision) else MASK_TRACES):
            effects = self._asked(lambda: self.predictor.block_effects(self.best, samples=self.samples))
        alternatives.append(self._alternative(*self._in_other_precision()))
        return Insight(
            best=best,
            naive=naive,
            alternatives=tuple(other for other in alternatives if other is not None),
            blocks=effects or (),
        )

    def _changed(self) -> Iterator[tuple[Technique, Candidate]]:
        """The best candidate with its split or its checkpointing changed."""
        best = self.best
        splits: dict[Technique, int] = {
            "smaller_micro_batch": min(best.accumulation_steps * 2, self.samples),
            "larger_micro_batch": best.accumulation_steps // 2,
        }
        for technique, steps in splits.items():
            if steps and steps != best.accumulation_steps:
                size = max(balanced(self.samples, steps))
                yield technique, best.model_copy(update={"micro_batch_size": size, "accumulation_steps": steps})
        for technique, checkpointing in self._checkpointings():
            if checkpointing != best.checkpointing:
                yield technique, best.model_copy(update={"checkpointing": checkpointing})

    def _in_other_precision(self) -> tuple[Technique, Candidate]:
        other: Precision = self.half if self.best.precision in ("float32", "tf32") else "float32"
        return _PRECISIONS[other], self.best.model_copy(update={"precision": other})

    def _checkpointings(self) -> Iterator[tuple[Technique, Checkpointing]]:
        yield "no_checkpointing", Checkpointing()
        if self.blocks.names:
            yield "full_checkpointing", Checkpointing(mode="full", blocks=self.blocks.names)
            if self.predictor.on_cuda:
                yield "offload", Checkpointing(mode="offload", blocks=self.blocks.names)
        if self.blocks.selective:
            yield "selective_checkpointing", Checkpointing(mode="selective", blocks=self.blocks.selective)

    def _memory(self, candidate: Candidate) -> StepMemory | None:
        if not self._in_reach(candidate):
            return None
        return self._asked(lambda: self.predictor.step_memory(candidate, samples=self.samples))

    def _alternative(self, technique: Technique, candidate: Candidate) -> Alternative | None:
        if not self._in_reach(candidate):
            return None
        needed = self._asked(lambda: self.predictor.needed_bytes(candidate, samples=self.samples))
        return None if needed is None else Alternative(technique=technique, candidate=candidate, needed_bytes=needed)

    def _in_reach(self, candidate: Candidate) -> bool:
        return self._affordable(0 if self.predictor.knows(candidate) else LINE_TRACES)

    def _affordable(self, traces: int) -> bool:
        return time.monotonic() + traces * self.predictor.trace_seconds < self.deadline

    def _asked(self, question: Callable[[], T]) -> T | None:
        if not self._affordable(0):
            return None
        answer, failure = guarded(question)
        if failure is not None:
            logger.info("not predicted for the plan: %s", failure.message)
        return answer


_PRECISIONS: dict[Precision, Technique] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
