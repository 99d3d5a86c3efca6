"""The Optuna study in which trials are written down: numbers, storage, resuming, several workers, dashboard.

An Optuna trial carries the parameters `micro_batch_size`, `accumulation_steps`, `precision` and `checkpointing` for
people to read, and the whole `Trial` as a user attribute. How outcomes are told:

| outcome                       | Optuna state | constraint "memory"      |
|-------------------------------|--------------|--------------------------|
| feasible                      | COMPLETE     | ≤ 0, value: samples/s    |
| out_of_memory, over_budget    | PRUNED       | > 0: share above the cap |
| unstable, slower              | PRUNED       | 0: memory was not at fault |
| invalid, or an exception      | FAIL         | none: a fault, not a result |
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, get_args

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState
from pydantic import ValidationError

from autofit.candidate import Candidate, CheckpointingMode, Precision
from autofit.errors import ConfigError
from autofit.plan import Trial
from autofit.search.worker import describe_worker, is_alive
from autofit.units import format_bytes

_logger = logging.getLogger(__name__)

# A candidate whose process died this often is left alone: it may be what kills it.
DEATHS = 2


@dataclass(frozen=True)
class Entry:
    """One trial of the study: the candidate that was asked for, and the result once there is one."""

    number: int
    candidate: Candidate
    trial: Trial | None
    running: bool
    died: bool


class ChosenSampler(optuna.samplers.BaseSampler):
    """Hands Optuna the candidate that was chosen; parameters that it does not know are drawn at random."""

    def __init__(self, *, seed: int) -> None:
        self.chosen: dict[str, Any] = {}
        self._random = optuna.samplers.RandomSampler(seed=seed)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}  # parameters are asked for one by one

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        if param_name in self.chosen:
            return self.chosen[param_name]
        return self._random.sample_independent(study, trial, param_name, param_distribution)


class Ledger:
    """A study, read and written in terms of candidates and trials. Close it with `open_ledger`."""

    def __init__(self, study: optuna.Study, sampler: ChosenSampler, *, cap_bytes: int | None, largest: int) -> None:
        self._study = study
        self._sampler = sampler
        self._cap = cap_bytes
        self._distributions = _distributions(largest)
        self._finished: dict[int, Entry | None] = {}

    def entries(self) -> list[Entry]:
        """All trials of the study that are still true under this cap, in order of their numbers."""
        with _quiet():
            frozen = self._study.get_trials(deepcopy=False)
        found = []
        for trial in frozen:
            if trial.number not in self._finished:
                entry = self._read(trial)
                if trial.state.is_finished():
                    self._finished[trial.number] = entry
            else:
                entry = self._finished[trial.number]
            if entry is not None:
                found.append(entry)
        return found

    def start(self, candidate: Candidate) -> optuna.Trial | None:
        """Opens a trial for `candidate`; None when another worker took the same one at the same moment."""
        with _quiet():
            trial = self._study.ask()
            trial.set_user_attr("worker", describe_worker())
            trial.set_user_attr("candidate", candidate.model_dump(mode="json"))
            if any(entry.candidate == candidate and entry.number < trial.number for entry in self._blocking()):
                trial.set_user_attr("error", "taken by another worker at the same moment")
                self._study.tell(trial, state=TrialState.FAIL)
                return None
            self._sampler.chosen = _parameters(candidate)
            for name, distribution in self._distributions.items():
                trial._suggest(name, distribution)
        return trial

    def finish(self, running: optuna.Trial, result: Trial) -> Trial:
        """Writes the result down and gives it the study's number."""
        result = result.model_copy(update={"number": running.number})
        with _quiet():
            running.set_user_attr("cap_bytes", self._cap)
            running.set_user_attr("trial", result.model_dump(mode="json"))
            state, value = _told(result)
            constraint = _constraint(result, self._cap)
            if constraint is not None:
                running.set_constraint("memory", constraint)
            self._study.tell(running, value, state=state)
        return result

    def fail(self, running: optuna.Trial, error: BaseException) -> None:
        """Closes a trial that raised; its candidate stays untried."""
        with _quiet():
            running.set_user_attr("error", f"{type(error).__name__}: {error}"[:1000])
            self._study.tell(running, state=TrialState.FAIL)

    def record(self, result: Trial) -> Trial | None:
        """Writes down a trial that was not run; None when its candidate has one already."""
        running = self.start(result.candidate)
        return None if running is None else self.finish(running, result)

    def bury_the_dead(self) -> None:
        """Closes the trials that dead processes left running, so that their candidates can be tried again."""
        with _quiet():
            for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                worker = trial.user_attrs.get("worker")
                if worker and not is_alive(worker, started=trial.datetime_start or datetime.now()):
                    _logger.info("trial %d was left running by a dead process", trial.number)
                    self._study.tell(trial.number, state=TrialState.FAIL)

    def _blocking(self) -> list[Entry]:
        return [entry for entry in self.entries() if entry.running or entry.trial is not None]

    def _read(self, frozen: FrozenTrial) -> Entry | None:
        """None for what is not a trial of ours or no longer true."""
        attributes = frozen.user_attrs
        try:
            candidate = Candidate.model_validate(attributes["candidate"])
            trial = Trial.model_validate(attributes["trial"]) if "trial" in attributes else None
        except (KeyError, ValidationError):
            return None
        if trial is not None:
            trial = under_cap(trial, cap_then=attributes.get("cap_bytes"), cap_now=self._cap)
            if trial is None:
                return None
        return Entry(
            number=frozen.number,
            candidate=candidate,
            trial=trial,
            running=not frozen.state.is_finished(),
            died=frozen.state == TrialState.FAIL and trial is None and "error" not in attributes,
        )


@contextmanager
def open_ledger(
    *, storage: str | None, study_name: str | None, seed: int, cap_bytes: int | None, space: Sequence[Candidate]
) -> Iterator[Ledger]:
    """The study of that name in that storage, continued if it exists; in memory without a storage.

    Raises ConfigError when the storage cannot be opened or the study is not one of ours.
    """
    backend = None if storage is None else _open_storage(storage)
    try:
        sampler = ChosenSampler(seed=seed)
        with _quiet():
            study = optuna.create_study(
                storage=backend, study_name=study_name, sampler=sampler, direction="maximize", load_if_exists=True
            )
        if study.direction != optuna.study.StudyDirection.MAXIMIZE:
            raise ConfigError(
                f"The study {study_name!r} in {storage!r} minimises, so it is not one of autofit's, which maximise "
                "samples per second. Pass another study_name."
            )
        ledger = Ledger(study, sampler, cap_bytes=cap_bytes, largest=_largest_number(space))
        ledger.bury_the_dead()
        yield ledger
    finally:
        if backend is not None:
            backend.remove_session()
            backend.engine.dispose()


def _open_storage(url: str) -> optuna.storages.RDBStorage:
    # SQLite locks the whole file for every write, so several workers have to wait for each other.
    options = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else None
    try:
        return optuna.storages.RDBStorage(url, engine_kwargs=options)
    except Exception as error:
        raise ConfigError(
            f"The storage {url!r} cannot be opened ({type(error).__name__}: {error}). Allowed: a database URL that "
            "Optuna knows, such as 'sqlite:///autofit.db', or None to keep nothing."
        ) from error


def under_cap(trial: Trial, *, cap_then: int | None, cap_now: int | None) -> Trial | None:
    """A trial of an earlier run as it stands under today's cap; None when it has to be tried again to know."""
    if trial.outcome in ("out_of_memory", "over_budget"):
        still_true = cap_then is None or (cap_now is not None and cap_now <= cap_then)
        return trial if still_true else None
    return within_cap(trial, cap_now)


def within_cap(trial: Trial, cap_bytes: int | None) -> Trial:
    """The trial, as over_budget when it ran but its peak lies above the cap."""
    peak = trial.peak_reserved_bytes
    if not trial.feasible or cap_bytes is None or peak is None or peak <= cap_bytes:
        return trial
    message = f"ran, but held {format_bytes(peak)} of {format_bytes(cap_bytes)}"
    return trial.model_copy(update={"outcome": "over_budget", "message": message})


def _told(result: Trial) -> tuple[TrialState, float | None]:
    if result.feasible:
        return TrialState.COMPLETE, result.samples_per_second
    return (TrialState.FAIL if result.outcome == "invalid" else TrialState.PRUNED), None


def _constraint(result: Trial, cap_bytes: int | None) -> float | None:
    """How far memory lies above the cap, as a share of it; at most 0 is feasible."""
    if result.outcome == "invalid":
        return None
    peak = result.peak_reserved_bytes or result.predicted_peak_bytes
    share = peak / cap_bytes - 1 if peak and cap_bytes else None
    if result.outcome in ("out_of_memory", "over_budget"):
        # What was reached before it ran out lies below the cap; how far the need lies above it is unknown.
        return share if share is not None and share > 0 else 1.0
    return min(share or 0.0, 0.0)


def _largest_number(space: Sequence[Candidate]) -> int:
    return max(max(candidate.micro_batch_size, candidate.accumulation_steps) for candidate in space)


def _distributions(largest: int) -> dict[str, BaseDistribution]:
    return {
        "micro_batch_size": IntDistribution(1, largest),
        "accumulation_steps": IntDistribution(1, largest),
        # Optuna refuses choices that change within a study, so these are all there are, not those of the space.
        "precision": CategoricalDistribution(get_args(Precision)),
        "checkpointing": CategoricalDistribution(get_args(CheckpointingMode)),
    }


def _parameters(candidate: Candidate) -> dict[str, Any]:
    return {
        "micro_batch_size": candidate.micro_batch_size,
        "accumulation_steps": candidate.accumulation_steps,
        "precision": candidate.precision,
        "checkpointing": candidate.checkpointing.mode,
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Optuna's notices of this thread off the screen, and nobody else's, without touching its verbosity."""
    thread = threading.get_ident()
    handlers = list(logging.getLogger("optuna").handlers)

    def from_elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno >= logging.WARNING

    for handler in handlers:
        handler.addFilter(from_elsewhere)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(from_elsewhere)
