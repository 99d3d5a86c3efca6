"""The study as a ledger of candidates and trials: numbers, resuming, several workers.

An Optuna trial carries the parameters `micro_batch_size`, `accumulation_steps`, `precision` and `checkpointing` for
people to read, the whole `Trial` as a user attribute, and its figures as attributes of their own, for Optuna's
dashboard and data frames. How outcomes are told:

| outcome                    | Optuna state | constraint "memory"                |
|----------------------------|--------------|------------------------------------|
| feasible                   | COMPLETE     | ≤ 0; the value is samples/s        |
| out_of_memory, over_budget | PRUNED       | > 0, so that samplers learn from it |
| unstable, slower           | PRUNED       | ≤ 0: memory was not at fault       |
| invalid, or an exception   | FAIL         | none: a fault, not a result        |
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import get_args

import optuna
from optuna.trial import FrozenTrial, TrialState
from pydantic import ValidationError

from autofit.candidate import Candidate, CheckpointingMode, Precision
from autofit.plan import Trial
from autofit.search.storage import storage_errors
from autofit.search.study import ChosenSampler, quiet
from autofit.search.worker import describe_worker, is_alive
from autofit.units import MiB, format_bytes

_logger = logging.getLogger(__name__)

# A worker writes its candidate down just after its trial has begun; one that takes longer than this has died.
CLAIM_WAIT_SECONDS = 5.0
CLAIM_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Entry:
    """One trial of the study: the candidate that was asked for, and the result once there is one.

    `died`: its process ended before it did.
    """

    number: int
    candidate: Candidate
    trial: Trial | None
    running: bool
    died: bool


class Ledger:
    """A study, read and written in terms of candidates and trials; results are those under `cap_bytes`."""

    def __init__(self, study: optuna.Study, sampler: ChosenSampler, *, cap_bytes: int | None) -> None:
        self._study = study
        self._sampler = sampler
        self._cap = cap_bytes
        self._finished: dict[int, Entry | None] = {}
        self._given_up_on: set[int] = set()

    def entries(self) -> list[Entry]:
        """All trials that are still true under this cap, in order of their numbers."""
        with quiet(), storage_errors():
            frozen = self._study.get_trials(deepcopy=False)
        entries = []
        for trial in frozen:
            entry = self._finished.get(trial.number) or self._read(trial)
            if trial.state.is_finished():
                self._finished[trial.number] = entry
            if entry is not None:
                entries.append(entry)
        return entries

    def start(self, candidate: Candidate) -> optuna.Trial | None:
        """Opens a trial for `candidate`; None when another worker took the same one at the same moment."""
        asked = {"candidate": candidate.model_dump(mode="json"), "cap_bytes": self._cap, "worker": describe_worker()}
        with quiet(), storage_errors():
            trial = self._study.ask()
            trial.set_user_attr("asked", asked)
            if self._is_taken(candidate, before=trial.number):
                trial.set_user_attr("error", "taken by another worker at the same moment")
                self._study.tell(trial, state=TrialState.FAIL)
                return None
            self._write_parameters(trial, candidate)
        return trial

    def finish(self, running: optuna.Trial, result: Trial) -> None:
        """Writes the result down."""
        with quiet(), storage_errors():
            running.set_user_attr("trial", result.model_dump(mode="json"))
            for name, value in _for_people(result):
                running.set_user_attr(name, value)
            constraint = _constraint(result, self._cap)
            if constraint is not None:
                running.set_constraint("memory", constraint)
            self._study.tell(running, result.samples_per_second if result.feasible else None, state=_state(result))

    def fail(self, running: optuna.Trial, error: BaseException) -> None:
        """Closes a trial that raised; its candidate stays untried."""
        with quiet(), storage_errors():
            running.set_user_attr("error", f"{type(error).__name__}: {error}"[:1000])
            self._study.tell(running, state=TrialState.FAIL)

    def bury_the_dead(self) -> None:
        """Closes the trials that dead processes left running, so that their candidates can be tried again."""
        with quiet(), storage_errors():
            for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                worker = trial.user_attrs.get("asked", {}).get("worker")
                if worker and not is_alive(worker, started=trial.datetime_start or datetime.now()):
                    _logger.info("trial %d was left running by a process that is dead", trial.number)
                    self._study.tell(trial.number, state=TrialState.FAIL)

    def _is_taken(self, candidate: Candidate, *, before: int) -> bool:
        """Whether a trial with a lower number has the candidate.

        Those trials exist, since numbers are given in order, but some may not have said yet which candidate is theirs.
        """
        deadline = time.monotonic() + CLAIM_WAIT_SECONDS
        while (silent := self._silent(before)) and time.monotonic() < deadline:
            time.sleep(CLAIM_POLL_SECONDS)
        self._given_up_on |= silent
        return any(
            entry.candidate == candidate and entry.number < before and (entry.running or entry.trial is not None)
            for entry in self.entries()
        )

    def _silent(self, before: int) -> set[int]:
        running = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return {t.number for t in running if t.number < before and "asked" not in t.user_attrs} - self._given_up_on

    def _write_parameters(self, trial: optuna.Trial, candidate: Candidate) -> None:
        size, steps = candidate.micro_batch_size, candidate.accumulation_steps
        self._sampler.chosen = {
            "micro_batch_size": size,
            "accumulation_steps": steps,
            "precision": candidate.precision,
            "checkpointing": candidate.checkpointing.mode,
        }
        largest = size * steps
        trial.suggest_int("micro_batch_size", 1, largest)
        trial.suggest_int("accumulation_steps", 1, largest)
        # Optuna refuses choices that change within a study, so these are all there are, not those of the space.
        trial.suggest_categorical("precision", get_args(Precision))
        trial.suggest_categorical("checkpointing", get_args(CheckpointingMode))

    def _read(self, frozen: FrozenTrial) -> Entry | None:
        """None for what is no trial of autofit's, or no longer true."""
        asked, result = frozen.user_attrs.get("asked"), frozen.user_attrs.get("trial")
        if asked is None:
            return None
        try:
            candidate = Candidate.model_validate(asked["candidate"])
            trial = Trial.model_validate(result) if result else None
        except ValidationError:
            return None
        if trial is not None:
            trial = under_cap(trial, cap_then=asked["cap_bytes"], cap_now=self._cap)
            if trial is None:
                return None
        return Entry(
            number=frozen.number,
            candidate=candidate,
            trial=trial,
            running=not frozen.state.is_finished(),
            died=frozen.state == TrialState.FAIL and trial is None and "error" not in frozen.user_attrs,
        )


def under_cap(trial: Trial, *, cap_then: int | None, cap_now: int | None) -> Trial | None:
    """A trial of an earlier run as it stands under today's cap; None when it has to be tried again to know."""
    if trial.outcome in ("out_of_memory", "over_budget"):
        still_true = cap_then is None or (cap_now is not None and cap_now <= cap_then)
        return trial if still_true else None
    if trial.outcome == "slower" and cap_now is not None and (cap_then is None or cap_now < cap_then):
        return None  # what was faster may not fit any more
    return within_cap(trial, cap_now)


def within_cap(trial: Trial, cap_bytes: int | None) -> Trial:
    """The trial, as over_budget when it ran but its peak lies above the cap."""
    peak = trial.peak_reserved_bytes
    if not trial.feasible or cap_bytes is None or peak is None or peak <= cap_bytes:
        return trial
    message = f"ran, but held {format_bytes(peak)} of {format_bytes(cap_bytes)}"
    return trial.model_copy(update={"outcome": "over_budget", "message": message})


def _for_people(result: Trial) -> Iterator[tuple[str, str | float]]:
    """What a column of a table should hold: short names, numbers to sort by."""
    yield "outcome", result.outcome
    yield "recomputed", str(result.candidate.checkpointing)  # the mask that was solved, not only its mode
    for name, nbytes in (("peak_MiB", result.peak_reserved_bytes), ("predicted_peak_MiB", result.predicted_peak_bytes)):
        if nbytes is not None:
            yield name, round(nbytes / MiB, 1)
    if result.samples_per_second is not None:
        yield "samples_per_second", round(result.samples_per_second, 3)  # Optuna calls the value "objective 0"
    if result.step_seconds is not None:
        yield "step_seconds", result.step_seconds.median
    if result.message:
        yield "message", result.message.partition("\n")[0]


def _state(result: Trial) -> TrialState:
    if result.feasible:
        return TrialState.COMPLETE
    return TrialState.FAIL if result.outcome == "invalid" else TrialState.PRUNED


def _constraint(result: Trial, cap_bytes: int | None) -> float | None:
    """How far memory lies above the cap, as a share of it; at most 0 is feasible."""
    if result.outcome == "invalid":
        return None
    peak = result.peak_reserved_bytes or result.predicted_peak_bytes
    share = peak / cap_bytes - 1 if peak and cap_bytes else None
    if result.outcome in ("out_of_memory", "over_budget"):
        # What was held when it ran out lies below the cap; how far the need lies above it, nobody knows.
        return share if share is not None and share > 0 else 1.0
    return min(share or 0.0, 0.0)
