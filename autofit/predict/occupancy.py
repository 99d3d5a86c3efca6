"""Memory over the last optimizer step of a trace, part by part, at as many moments as a picture needs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from autofit.candidate import Candidate
from autofit.insight import MemoryParts, PhaseStart, StepMemory, StepPhase
from autofit.memory import fit_threshold
from autofit.predict.line import SizedTrace
from autofit.predict.prediction import allocator_events
from autofit.predict.recorder import Category, Trace

MOMENTS = 120
LEAST_OF_A_PHASE = 4
_PARTS: dict[Category, str] = {
    "buffers": "weights",
    "scratch": "temporary",
    "workspaces": "temporary",
}


def step_memory(sized: SizedTrace, candidate: Candidate) -> StepMemory:
    """What is in use over the step that has the optimizer's state from before; sizes as blocks of the allocator."""
    start, phases = _phases(sized.trace)
    moments, starts = _moments(sized.in_use(), start, phases)
    return StepMemory(
        candidate=candidate,
        needed_bytes=fit_threshold(allocator_events(sized)),
        phases=starts,
        parts=_parts(sized.trace, sized.blocks(), moments),
    )


def _phases(trace: Trace) -> tuple[int, list[tuple[int, StepPhase]]]:
    """Where the last step begins, and from which event on each of its phases runs."""
    first = max(number for number, (_, name) in enumerate(trace.marks) if name == "micro 0")
    phases: list[tuple[int, StepPhase]] = []
    ends = [*(at for at, _ in trace.marks[first + 1 :]), len(trace.events)]
    for (start, name), end in zip(trace.marks[first:], ends, strict=True):
        if name == "optimizer":
            phases.append((start, "optimizer"))
            continue
        phases.append((start, "forward"))
        births = [(at, trace.phases[trace.events[at]]) for at in range(start, end) if trace.events[at] >= 0]
        forward = next((at for at, phase in births if phase == "forward"), start)  # before it, the batch is taken apart
        backward = next((at for at, phase in births if phase == "backward" and at > forward), None)
        if backward is not None:
            phases.append((backward, "backward"))
    return trace.marks[first][0], phases


def _moments(
    used: Sequence[int], start: int, phases: Sequence[tuple[int, StepPhase]]
) -> tuple[list[int], tuple[PhaseStart, ...]]:
    """The events that are kept: of each stretch of a phase the one with the most bytes in use."""
    moments: list[int] = []
    starts: list[PhaseStart] = []
    for (begin, phase), (end, _) in pairwise([*phases, (len(used), "optimizer")]):
        count = max(LEAST_OF_A_PHASE, MOMENTS * (end - begin) // max(len(used) - start, 1))
        width = max(-(-(end - begin) // count), 1)
        starts.append(PhaseStart(at=len(moments), phase=phase))
        windows = (range(first, min(first + width, end)) for first in range(begin, end, width))
        moments.extend(max(window, key=used.__getitem__) for window in windows)
    return moments, tuple(starts)


def _parts(trace: Trace, blocks: Sequence[int], moments: Sequence[int]) -> MemoryParts:
    now = dict.fromkeys(MemoryParts.model_fields, 0)
    series: dict[str, list[int]] = {name: [] for name in now}
    done = 0
    for moment in moments:
        for event in trace.events[done : moment + 1]:
            index = event if event >= 0 else ~event
            category = trace.categories[index]
            now[_PARTS.get(category, category)] += blocks[index] if event >= 0 else -blocks[index]
        done = moment + 1
        for name, nbytes in now.items():
            series[name].append(nbytes)
    return MemoryParts(**{name: tuple(values) for name, values in series.items()})
