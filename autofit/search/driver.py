"""The search: try what could be fastest among what should fit, learn, repeat until nothing could beat the best."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

from autofit.candidate import Candidate
from autofit.errors import ConfigError, StorageError
from autofit.plan import Trial
from autofit.search.evidence import Evidence
from autofit.search.fit import Fit
from autofit.search.ledger import Entry, Ledger, within_cap
from autofit.search.lines import Space
from autofit.search.strategy import Strategy
from autofit.search.study import ChosenSampler, open_study
from autofit.units import format_bytes

_logger = logging.getLogger(__name__)

# The bound when none is given. A search on a device that behaves ends by itself, long before.
MAX_TRIALS = 64
# A candidate whose process died this often is left alone: it may be what kills it.
DEATHS = 2


def search(
    space: Sequence[Candidate],
    evaluate: Callable[[Candidate], Trial],
    *,
    cap_bytes: int | None = None,
    predict: Callable[[Candidate], int | None] | None = None,
    max_trials: int | None = None,
    timeout: float | None = None,
    seed: int = 0,
    storage: str | None = None,
    study_name: str | None = None,
    on_trial: Callable[[Trial], None] | None = None,
) -> list[Trial]:
    """Looks for the candidate with the most samples per second by trying few of them; returns all trials.

    `evaluate` tries a candidate for real; its `Trial.number` is replaced by the study's. No candidate is tried twice,
    nor one with a larger micro-batch than another, otherwise equal, that did not fit into `cap_bytes`.
    `predict` tells the bytes that a candidate needs (None: unknown). What is predicted not to fit is not tried; the
    first such split of each line is recorded as `over_budget`, so that the trials show where memory ends.
    `max_trials` bounds the trials that were run in the study, those of earlier runs and other workers included
    (64 when left out); `timeout` in seconds bounds when the last one begins; the first always does.
    `storage` and `study_name` name an Optuna study, which is continued if it exists and may be shared by workers.
    `on_trial` is called after each trial of this call. An exception from `evaluate` passes through; its trial is
    closed. Raises ConfigError when an argument cannot be meant, StorageError when the study cannot be read or written.
    """
    _check(space, cap_bytes=cap_bytes, max_trials=max_trials, timeout=timeout)
    lines = Space(space)
    fit = Fit(lines, cap_bytes=cap_bytes, predict=predict)
    strategy = Strategy(lines, fit)
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    report = on_trial or _say_nothing
    sampler = ChosenSampler(seed=seed)
    with open_study(storage=storage, name=study_name, sampler=sampler) as study:
        ledger = Ledger(study, sampler, cap_bytes=cap_bytes)
        ledger.bury_the_dead()
        while (count := _trials_run(entries := _of_space(ledger, lines))) < (max_trials or MAX_TRIALS):
            if count and time.monotonic() >= deadline:
                _logger.info("the search ends after %g seconds", timeout)
                break
            candidate = strategy.propose(_evidence(lines, entries, cap_bytes))
            if candidate is None:
                break
            _try(candidate, evaluate, ledger, cap_bytes=cap_bytes, report=report)
        for candidate, needed in fit.first_beyond(_evidence(lines, _of_space(ledger, lines), cap_bytes)):
            _try(candidate, _predicted_not_to_fit(needed), ledger, cap_bytes=cap_bytes, report=report)
        return [entry.trial for entry in _of_space(ledger, lines) if entry.trial is not None]


def _check(space: Sequence[Candidate], *, cap_bytes: int | None, max_trials: int | None, timeout: float | None) -> None:
    if not space:
        raise ConfigError("The space has no candidates: pass at least one.")
    if cap_bytes is not None and cap_bytes < 0:
        raise ConfigError(f"cap_bytes={cap_bytes!r} is not allowed: pass bytes from 0 on, or None for no known cap.")
    if max_trials is not None and (isinstance(max_trials, bool) or not isinstance(max_trials, int) or max_trials < 1):
        raise ConfigError(
            f"max_trials={max_trials!r} is not allowed: pass a number from 1 on, or None for the default."
        )
    if timeout is not None and not timeout > 0:
        raise ConfigError(f"timeout={timeout!r} is not allowed: pass seconds above 0, or None for no limit.")


def _try(
    candidate: Candidate,
    evaluate: Callable[[Candidate], Trial],
    ledger: Ledger,
    *,
    cap_bytes: int | None,
    report: Callable[[Trial], None],
) -> None:
    """Runs one trial, writes it down and reports it; nothing when another worker took the candidate just now."""
    running = ledger.start(candidate)
    if running is None:
        return
    try:
        result = evaluate(candidate)
    except BaseException as error:
        with contextlib.suppress(StorageError):  # the error says more than that it could not be written down
            ledger.fail(running, error)
        raise
    result = _judged(result, cap_bytes).model_copy(update={"number": running.number})
    try:
        ledger.finish(running, result)
    except StorageError:
        report(result)
        raise
    report(result)


def _judged(result: Trial, cap_bytes: int | None) -> Trial:
    """A result that claims to be feasible, held against what that means: a speed, and a peak within the cap."""
    if result.feasible and not result.samples_per_second:
        return result.model_copy(update={"outcome": "invalid", "message": "ran, but no speed was measured"})
    return within_cap(result, cap_bytes)


def _predicted_not_to_fit(needed: int) -> Callable[[Candidate], Trial]:
    """Stands in for an evaluation that would only show what is known already."""
    return lambda candidate: Trial(
        number=0,
        candidate=candidate,
        outcome="over_budget",
        predicted_peak_bytes=needed,
        message=f"predicted to need {format_bytes(needed)}; not run",
    )


def _of_space(ledger: Ledger, lines: Space) -> list[Entry]:
    return [entry for entry in ledger.entries() if lines.find(entry.candidate)]


def _trials_run(entries: Sequence[Entry]) -> int:
    return sum(entry.running or (entry.trial is not None and entry.trial.was_run) for entry in entries)


def _evidence(lines: Space, entries: Sequence[Entry], cap_bytes: int | None) -> Evidence:
    deaths = Counter(entry.candidate for entry in entries if entry.died)
    taken = [entry.candidate for entry in entries if entry.running]
    taken += [candidate for candidate, count in deaths.items() if count >= DEATHS]
    tried = [(entry.candidate, entry.trial) for entry in entries if entry.trial is not None]
    return Evidence(lines, tried, cap_bytes=cap_bytes, taken=taken)


def _say_nothing(trial: Trial) -> None:
    pass
