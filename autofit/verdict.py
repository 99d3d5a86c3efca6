"""From what happened to a trial: outcome, bytes, seconds, and a message for people."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from autofit.candidate import Candidate
from autofit.errors import DeviceLostError
from autofit.memory import Reading
from autofit.oom import Failure
from autofit.plan import Outcome, Seconds, Trial
from autofit.timing import Round
from autofit.units import format_bytes


class UnstableError(Exception):
    """The loss is not finite, or float16 found no gradient scale that keeps the gradients finite."""


def measured_trial(
    candidate: Candidate, rounds: Sequence[Round], reading: Reading, *, samples: int, cap_bytes: int, outside_bytes: int
) -> Trial:
    """The trial of a candidate that ran: feasible, unless its peak lies above the cap all the same."""
    micro = statistics.median(r.micro_step_seconds for r in rounds)
    step_seconds = Seconds.of(r.step_seconds(candidate.accumulation_steps) for r in rounds)
    outcome, message = judge_memory(reading, cap_bytes=cap_bytes, outside_bytes=outside_bytes)
    if reading.peak_allocated_bytes <= 0 or step_seconds.median <= 0:
        outcome, message = "invalid", "the step took no time or no memory, so nothing was trained"
    return Trial(
        number=0,
        candidate=candidate,
        outcome=outcome,
        peak_reserved_bytes=reading.peak_reserved_bytes,
        peak_allocated_bytes=reading.peak_allocated_bytes,
        alloc_retries=reading.alloc_retries,
        micro_step_seconds=micro,
        optimizer_seconds=statistics.median(r.optimizer_seconds for r in rounds),
        step_seconds=step_seconds,
        samples_per_second=samples / step_seconds.median if step_seconds.median > 0 else None,
        message=message,
    )


def judge_memory(reading: Reading, *, cap_bytes: int, outside_bytes: int) -> tuple[Outcome, str]:
    """Whether a run stayed inside the cap, by its measured peak and not by the absence of an exception.

    `outside_bytes` is how much the process's memory outside the allocator has grown since the cap was computed.
    """
    need = reading.peak_reserved_bytes + outside_bytes
    if need <= cap_bytes:
        return "feasible", ""
    grown = f" and {format_bytes(outside_bytes)} more outside the allocator" if outside_bytes else ""
    peak = format_bytes(reading.peak_reserved_bytes)
    return "over_budget", f"peak of {peak} reserved{grown}, above the cap of {format_bytes(cap_bytes)}"


def failed_trial(
    candidate: Candidate, failure: Failure, *, phase: str, reading: Reading | None, device: torch.device
) -> Trial:
    """The trial of a candidate that raised; its peaks are those reached until then.

    What may be memory counts as memory: the search goes down, and only if nothing smaller passes was it something else.
    Raises DeviceLostError when no further trial can run.
    """
    if failure.kind == "device_lost":
        raise DeviceLostError(
            f"The device context of {device} is lost: {failure.message} (in {phase} of {candidate}). Nothing more can "
            "run in this process. Start a new one; CUDA_LAUNCH_BLOCKING=1 shows which line of the model does it."
        ) from failure.error
    outcome: Outcome = "out_of_memory" if failure.kind in ("memory", "maybe_memory") else "invalid"
    if isinstance(failure.error, UnstableError):
        outcome = "unstable"
    return Trial(
        number=0,
        candidate=candidate,
        outcome=outcome,
        peak_reserved_bytes=reading.peak_reserved_bytes if reading else None,
        peak_allocated_bytes=reading.peak_allocated_bytes if reading else None,
        alloc_retries=reading.alloc_retries if reading else None,
        message=f"{phase}: {failure.message}",
    )
