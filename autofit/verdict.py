"""From what happened to a trial: outcome, bytes, seconds, and a message for people."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch

from autofit.candidate import Candidate
from autofit.distributed import Report, first_failure
from autofit.errors import DeviceLostError
from autofit.memory import Reading
from autofit.oom import Failure
from autofit.plan import Outcome, Seconds, Trial
from autofit.timing import Round, is_hopeless
from autofit.units import format_bytes, format_seconds

# A step that takes this share longer than the best one's has lost; more where the best one's time is noisy.
CLEAR_MARGIN = 0.15
NOISE_MARGIN = 3.0
# Above this interquartile range, as a share of the median, step times say little.
NOISY_SHARE = 0.10


class UnstableError(Exception):
    """The loss is not finite, or float16 found no gradient scale that keeps the gradients finite."""


def measured_trial(
    candidate: Candidate,
    rounds: Sequence[Round],
    reading: Reading,
    *,
    samples: int,
    cap_bytes: int,
    outside_bytes: int,
    hopeless_seconds: float | None = None,
) -> Trial:
    """The trial of a candidate that ran: feasible, unless its peak lies above the cap all the same.

    One whose rounds all make a step longer than `hopeless_seconds` is `slower`.
    """
    micro = statistics.median(r.micro_step_seconds for r in rounds)
    step_seconds = Seconds.of(r.step_seconds(candidate.accumulation_steps) for r in rounds)
    outcome, message = judge_memory(reading, cap_bytes=cap_bytes, outside_bytes=outside_bytes)
    if (
        outcome == "feasible"
        and hopeless_seconds
        and is_hopeless(rounds, candidate.accumulation_steps, hopeless_seconds)
    ):
        outcome, message = "slower", _dropped(step_seconds, hopeless_seconds)
    elif outcome == "feasible":
        message = noise_message(step_seconds)
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


# Worst first: what holds for one rank holds for all.
_SEVERITY: tuple[Outcome, ...] = ("invalid", "unstable", "out_of_memory", "over_budget", "slower", "feasible")


def agreed_trial(reports: Sequence[Report[Trial]]) -> Trial:
    """One trial of what all ranks say of theirs: the largest peak counts, and the first rank that failed, for all.

    Times are the slowest rank's on every rank already; samples add up. Raises the error of a rank that has no trial.
    """
    failure = first_failure(reports)
    if failure is not None:
        raise failure.error
    trials = [report.value for report in reports if report.value is not None]
    failed = [(report.order, rank) for rank, report in enumerate(reports) if report.order]
    rank = min(failed)[1] if failed else min(range(len(trials)), key=lambda r: _SEVERITY.index(trials[r].outcome))
    decisive = trials[rank]
    if len(trials) == 1:
        return decisive
    peaks = {
        name: max((value for trial in trials if (value := getattr(trial, name)) is not None), default=None)
        for name in ("peak_reserved_bytes", "peak_allocated_bytes", "alloc_retries")
    }
    rates = [trial.samples_per_second for trial in trials]
    rate = None if failed or None in rates else math.fsum(rate or 0.0 for rate in rates)
    message = decisive.message and f"rank {rank}: {decisive.message}"
    return decisive.model_copy(update={**peaks, "samples_per_second": rate, "message": message})


def hopeless_seconds(rival: Trial | None) -> float | None:
    """The seconds of a step from which on a candidate cannot win any more against `rival`; None without one."""
    if rival is None or rival.step_seconds is None:
        return None
    return rival.step_seconds.median * (1 + max(CLEAR_MARGIN, NOISE_MARGIN * spread(rival.step_seconds)))


def spread(seconds: Seconds) -> float:
    """The interquartile range as a share of the median."""
    return seconds.iqr / seconds.median if seconds.median > 0 else 0.0


def noise_message(seconds: Seconds) -> str:
    """What a trial says of times that do not agree; nothing where they do, or where one figure is all there is."""
    if spread(seconds) <= NOISY_SHARE:
        return ""
    return (
        f"timing unstable: the middle half of {len(seconds.samples)} rounds spreads over {spread(seconds):.0%} of "
        f"their median"
    )


def noise_notes(best: Trial, trials: Sequence[Trial]) -> list[str]:
    """What a plan says where the machine was noisy: while the best trial was timed, or most of the others."""
    timed = [trial.step_seconds for trial in trials if trial.feasible and trial.step_seconds]
    noisy = sum(spread(seconds) > NOISY_SHARE for seconds in timed)
    own = spread(best.step_seconds) if best.step_seconds else 0.0
    if own <= NOISY_SHARE and noisy * 2 <= len(timed):
        return []
    return [
        f"Unstable because the machine is noisy: the times of {noisy} of {len(timed)} trials spread over more than "
        f"{NOISY_SHARE:.0%} of their median (interquartile range), those of the best over {own:.0%}. Smaller "
        "differences mean little. Stop what else runs here and tune again."
    ]


def _dropped(seconds: Seconds, hopeless: float) -> str:
    return (
        f"dropped after {len(seconds.samples)} round(s): {format_seconds(seconds.median)} per step, and what takes "
        f"longer than {format_seconds(hopeless)} cannot win any more"
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
