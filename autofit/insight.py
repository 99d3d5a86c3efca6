"""What a plan remembers of predictions, so that a report needs no model: memory over a step, blocks, alternatives."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from autofit.candidate import Candidate, CheckpointingMode, FrozenModel

StepPhase = Literal["forward", "backward", "optimizer"]
Technique = Literal[
    "smaller_micro_batch",
    "larger_micro_batch",
    "no_checkpointing",
    "full_checkpointing",
    "selective_checkpointing",
    "offload",
    "bfloat16",
    "float16",
    "float32",
]


def _from_text(value: Any) -> Any:
    return tuple(int(word) for word in value.split()) if isinstance(value, str) else value


# Whole numbers from 0 on; in JSON one string, so that a curve is one line of the file and not a hundred.
Series = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...],
    BeforeValidator(_from_text),
    PlainSerializer(lambda values: " ".join(map(str, values)), return_type=str, when_used="json"),
]


class MemoryParts(FrozenModel):
    """Bytes in use by what they are for, one figure per moment. `weights` contain buffers, `temporary` scratch."""

    weights: Series
    optimizer_states: Series
    gradients: Series
    inputs: Series
    activations: Series
    temporary: Series

    @model_validator(mode="after")
    def _equally_long(self) -> MemoryParts:
        if len({len(series) for series in self.series().values()}) != 1:
            raise ValueError("the parts do not have one figure for each moment")
        return self

    def series(self) -> dict[str, tuple[int, ...]]:
        """Every part by its name."""
        return {name: getattr(self, name) for name in type(self).model_fields}

    def totals(self) -> tuple[int, ...]:
        """Bytes in use at each moment."""
        return tuple(map(sum, zip(*self.series().values(), strict=True)))


class PhaseStart(FrozenModel):
    """From this moment on the phase runs."""

    at: int = Field(ge=0)
    phase: StepPhase


class StepMemory(FrozenModel):
    """Memory over one optimizer step with the optimizer's state there already, predicted.

    Moments follow the step's allocations and not the clock; of more than two micro-batches the first two are in it.
    `needed_bytes` is the smallest cap on the allocator that the step runs through.
    """

    candidate: Candidate
    needed_bytes: int = Field(ge=0)
    phases: tuple[PhaseStart, ...]
    parts: MemoryParts

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use."""
        return max(self.parts.totals(), default=0)

    def at_peak(self) -> dict[str, int]:
        """Bytes of each part at the moment with the most bytes in use."""
        at = self._peak_at()
        return {name: series[at] if series else 0 for name, series in self.parts.series().items()}

    def peak_phase(self) -> StepPhase:
        """What runs at the moment with the most bytes in use."""
        at = self._peak_at()
        phase: StepPhase = "forward"
        for start in self.phases:
            phase = start.phase if start.at <= at else phase
        return phase

    def _peak_at(self) -> int:
        """The moment with the most bytes in use."""
        totals = self.parts.totals()
        return totals.index(max(totals)) if totals else 0


class BlockEffect(FrozenModel):
    """One block in the best trial's step: its mode there, and what recomputing it alone would change, predicted.

    `saves_bytes`: how much lower the step's peak is than with nothing recomputed. `costs_share`: the time that a
    micro-step takes longer, as a share of it.
    """

    name: str
    mode: CheckpointingMode
    saves_bytes: int
    costs_share: float = Field(ge=0)


class Alternative(FrozenModel):
    """The best trial's candidate with one thing changed: the smallest allocator cap that it needs, predicted."""

    technique: Technique
    candidate: Candidate
    needed_bytes: int = Field(ge=0)


class Insight(FrozenModel):
    """What was predicted about the best trial once it was known; None or empty where it could not be."""

    version: Literal[1] = 1
    best: StepMemory | None = None
    naive: StepMemory | None = None
    blocks: tuple[BlockEffect, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
