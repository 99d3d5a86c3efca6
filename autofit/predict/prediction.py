"""What a prediction says, and how it is read off a trace."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ModelWrapValidatorHandler, PrivateAttr, computed_field, model_validator

from autofit.candidate import Candidate, FrozenModel
from autofit.memory import Event, fit_threshold, replay
from autofit.predict.line import SizedTrace
from autofit.predict.recorder import Phase
from autofit.units import format_bytes

TIMELINE_POINTS = 400
_STAGES: dict[Phase, str] = {
    "setup": "what is there before the step",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer step",
}


class Breakdown(FrozenModel):
    """Bytes in use at the peak by what they are for.

    `scratch` is what an operator takes for itself while it runs, `workspaces` what libraries keep from then on, and
    `rounding` what the allocator adds to make blocks of it all.
    """

    weights: int = 0
    gradients: int = 0
    optimizer_states: int = 0
    buffers: int = 0
    activations: int = 0
    inputs: int = 0
    temporary: int = 0
    scratch: int = 0
    workspaces: int = 0
    rounding: int = 0


class TimelinePoint(FrozenModel):
    """Bytes in use after one event: the largest of the events that the point stands for."""

    event: int
    allocated_bytes: int
    phase: Phase


class MemoryPrediction(FrozenModel):
    """What one candidate needs, from a trace without values.

    `peak_requested_bytes`, `peak_allocated_bytes`, `peak_reserved_bytes`: what the CUDA allocator's statistics of those
    names would say. The first is before any rounding, and so what the host's allocator hands out.
    `fit_threshold_bytes`: the smallest cap on the allocator that the step does not run out under. `device_bytes`: the
    reserved peak and what the process takes outside the allocator. `breakdown`, `phase`, `operator` and `module` are
    those of the moment with the most bytes in use. `notes` names what the trace could not see.
    """

    candidate: Candidate
    device: str
    source: Literal["predicted"] = "predicted"
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int
    context_bytes: int
    breakdown: Breakdown
    phase: Phase
    operator: str
    module: str
    timeline: tuple[TimelinePoint, ...]
    notes: tuple[str, ...] = ()

    _sized: SizedTrace | None = PrivateAttr(None)
    _threshold: int | None = PrivateAttr(None)

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, data: Any, handler: ModelWrapValidatorHandler[MemoryPrediction]) -> MemoryPrediction:
        """A prediction that was written down knows its threshold already."""
        threshold = None
        if isinstance(data, dict):
            data = dict(data)
            threshold = data.pop("fit_threshold_bytes", None)
        made = handler(data)
        if threshold is not None:
            made._threshold = int(threshold)
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemoryPrediction) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash((self.candidate, self.peak_allocated_bytes, self.peak_reserved_bytes))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def fit_threshold_bytes(self) -> int:
        """Found when it is asked for: it takes several replays."""
        if self._threshold is None:
            assert self._sized is not None
            self._threshold = fit_threshold(allocator_events(self._sized))
        return self._threshold

    @property
    def bottleneck(self) -> str:
        """What takes the memory at the peak, and whether recomputing activations could help, in a sentence or two."""
        parts = {name: nbytes for name, nbytes in self.breakdown.model_dump().items() if name != "rounding"}
        largest = sorted(parts, key=parts.__getitem__, reverse=True)[:3]
        named = ", ".join(f"{format_bytes(parts[name])} of {name.replace('_', ' ')}" for name in largest if parts[name])
        where = f" of {self.module}" if self.module and self.phase != "optimizer" else ""
        text = f"The peak is in {_STAGES[self.phase]}{where}, with {named}."
        if self.phase == "optimizer":
            text += " Recomputing activations cannot help there"
            temporary = parts["temporary"]
            saves = temporary > 0.05 * self.peak_allocated_bytes
            text += f"; a fused optimizer would save up to {format_bytes(temporary)}." if saves else "."
        return text


def describe(
    sized: SizedTrace, *, candidate: Candidate, device: str, context_bytes: int, notes: tuple[str, ...]
) -> MemoryPrediction:
    """Replays a trace through the allocator model and says what was in use when it needed most."""
    events = allocator_events(sized)
    peaks = replay(events)
    at, used = _peak(sized)
    breakdown = _breakdown(sized, at)
    breakdown["rounding"] = max(peaks.peak_allocated_bytes - sum(breakdown.values()), 0)
    last = sized.trace.events[at]
    prediction = MemoryPrediction(
        candidate=candidate,
        device=device,
        peak_requested_bytes=peaks.peak_requested_bytes,
        peak_allocated_bytes=peaks.peak_allocated_bytes,
        peak_reserved_bytes=peaks.peak_reserved_bytes,
        device_bytes=peaks.peak_reserved_bytes + context_bytes,
        context_bytes=context_bytes,
        breakdown=Breakdown(**breakdown),
        phase=sized.trace.phases[last],
        operator=sized.trace.operators[last],
        module=sized.trace.modules[last],
        timeline=_timeline(sized, used),
        notes=(*notes, *sized.trace.notes),
    )
    prediction._sized = sized
    return prediction


def allocator_events(sized: SizedTrace) -> list[Event]:
    """The trace as the allocator model takes it; storages without bytes never reach the allocator."""
    sizes = sized.sizes
    return [
        (event, sizes[event]) if event >= 0 else (~event, 0)
        for event in sized.trace.events
        if sizes[event if event >= 0 else ~event]
    ]


def _peak(sized: SizedTrace) -> tuple[int, list[int]]:
    """The event with the most bytes in use, and the bytes in use after each event."""
    used = sized.in_use()
    return max(range(len(used)), key=used.__getitem__, default=0), used


def _breakdown(sized: SizedTrace, at: int) -> dict[str, int]:
    live: set[int] = set()
    for event in sized.trace.events[: at + 1]:
        if event >= 0:
            live.add(event)
        else:
            live.discard(~event)
    result: dict[str, int] = dict.fromkeys(Breakdown.model_fields, 0)
    for index in live:
        result[sized.trace.categories[index]] += sized.sizes[index]
    return result


def _timeline(sized: SizedTrace, used: list[int]) -> tuple[TimelinePoint, ...]:
    events, phases = sized.trace.events, sized.trace.phases
    width = -(-len(events) // TIMELINE_POINTS)
    points, phase = [], phases[0] if phases else "setup"
    for start in range(0, len(events), width):
        window = range(start, min(start + width, len(events)))
        highest = max(window, key=used.__getitem__)
        phase = next((phases[events[i]] for i in range(highest, start - 1, -1) if events[i] >= 0), phase)
        points.append(TimelinePoint(event=highest, allocated_bytes=used[highest], phase=phase))
    return tuple(points)
