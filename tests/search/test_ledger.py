"""The study behind a search: what Optuna is told, resuming, several workers, silence."""

from __future__ import annotations

import io
import logging
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState
from simulated import Device, affine_bytes, affine_seconds, fitted, ran_out, space
from sqlalchemy import Engine, event

from autofit.candidate import Candidate
from autofit.errors import ConfigError
from autofit.plan import Trial, best_trial
from autofit.search import search
from autofit.search.ledger import under_cap
from autofit.search.study import quiet
from autofit.search.worker import GIVE_UP_AFTER, describe_worker, is_alive
from autofit.units import GiB

ALL = space(modes=("none", "full"))
CAP = 9 * GiB


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_disks() -> Iterator[None]:
    """SQLite leaves it to the system when to write: these tests end processes, not the power."""

    def relax(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "connect", relax)
    yield
    event.remove(Engine, "connect", relax)


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with Optuna's tables, which take a second to make."""
    path = tmp_path_factory.mktemp("empty") / "study.db"
    backend = optuna.storages.RDBStorage(f"sqlite:///{path}")
    backend.remove_session()
    backend.engine.dispose()
    return path


@pytest.fixture
def storage(empty_database: Path, tmp_path: Path) -> str:
    """The URL of a database without studies."""
    return f"sqlite:///{shutil.copy(empty_database, tmp_path)}"


def stored(storage: str) -> list[optuna.trial.FrozenTrial]:
    """The trials as Optuna reads them back."""
    backend = optuna.storages.RDBStorage(storage)
    try:
        return optuna.load_study(study_name="s", storage=backend).trials
    finally:
        backend.remove_session()
        backend.engine.dispose()


def test_outcomes_are_told_so_that_samplers_learn(storage):
    """C16: running out is PRUNED with a violated constraint, a result COMPLETE with its speed; FAIL is for faults."""
    device = Device(cap_bytes=CAP)
    search(ALL, device.evaluate, cap_bytes=CAP, predict=affine_bytes, storage=storage, study_name="s")
    for trial in stored(storage):
        outcome = trial.user_attrs["trial"]["outcome"]
        if outcome == "feasible":
            assert trial.state is TrialState.COMPLETE
            assert trial.value == trial.user_attrs["trial"]["samples_per_second"]
            assert trial.constraints["memory"] <= 0
        else:
            assert outcome == "over_budget"
            assert trial.state is TrialState.PRUNED
            assert trial.constraints["memory"] > 0
        assert set(trial.params) == {"micro_batch_size", "accumulation_steps", "precision", "checkpointing"}
    assert {trial.state for trial in stored(storage)} == {TrialState.COMPLETE, TrialState.PRUNED}


@pytest.mark.parametrize(
    ("outcome", "state", "feasible"),
    [
        ("out_of_memory", TrialState.PRUNED, False),
        ("over_budget", TrialState.PRUNED, False),
        ("unstable", TrialState.PRUNED, True),
        ("slower", TrialState.PRUNED, True),
        ("invalid", TrialState.FAIL, None),
    ],
)
def test_what_each_outcome_is_told_as(storage, outcome, state, feasible):
    """Every outcome that is no result has its state, and the constraint says whether memory was at fault."""

    def evaluate(candidate: Candidate) -> Trial:
        return Trial(number=7, candidate=candidate, outcome=outcome, peak_reserved_bytes=2 * CAP // 3)

    search(ALL, evaluate, cap_bytes=CAP, max_trials=1, storage=storage, study_name="s")
    (trial,) = stored(storage)
    assert trial.state is state
    assert (all(v <= 0 for v in trial.constraints.values()) if trial.constraints else None) is feasible


@pytest.mark.parametrize(("cap_now", "kept"), [(CAP, True), (2 * CAP, True), (CAP // 2, False), (None, True)])
def test_what_lost_is_tried_again_under_a_smaller_cap(cap_now: int | None, kept: bool) -> None:
    """What a candidate lost against may not fit any more; under the same cap or a larger one it still does."""
    trial = Trial(number=0, candidate=ALL[0], outcome="slower", samples_per_second=1.0, peak_reserved_bytes=1)
    assert (under_cap(trial, cap_then=CAP, cap_now=cap_now) is not None) == kept


def test_a_finished_study_is_not_repeated(storage):
    """A search that is continued after its end tries nothing again and gives the same answer."""
    first, second = Device(cap_bytes=CAP), Device(cap_bytes=CAP)
    arguments = {"cap_bytes": CAP, "predict": affine_bytes, "storage": storage, "study_name": "s"}
    once = search(ALL, first.evaluate, **arguments)
    again = search(ALL, second.evaluate, **arguments)
    assert second.calls == []
    assert again == once


def test_an_interrupted_search_continues_where_it_stopped(storage):
    """The two parts together try what one search would have tried; numbers go on; reports are only of new trials."""
    whole, device = Device(cap_bytes=CAP), Device(cap_bytes=CAP)
    search(ALL, whole.evaluate, cap_bytes=CAP)
    search(ALL, device.evaluate, cap_bytes=CAP, max_trials=3, storage=storage, study_name="s")
    reported: list[Trial] = []
    trials = search(ALL, device.evaluate, cap_bytes=CAP, storage=storage, study_name="s", on_trial=reported.append)
    assert device.calls == whole.calls
    assert [t.number for t in trials] == list(range(len(trials)))
    assert reported == trials[3:]


def test_max_trials_counts_those_of_earlier_runs(storage):
    """The bound is the study's: a run that continues does only what is left."""
    device = Device(cap_bytes=CAP)
    for _ in range(2):
        trials = search(ALL, device.evaluate, cap_bytes=CAP, max_trials=3, storage=storage, study_name="s")
    assert len(device.calls) == len(trials) == 3


def test_trials_of_another_space_are_ignored(storage):
    """A study of another space neither comes back nor counts."""
    search(space(batch=96), Device().evaluate, storage=storage, study_name="s")
    trials = search(ALL, Device().evaluate, storage=storage, study_name="s")
    assert {t.candidate for t in trials} <= set(ALL)
    assert best_trial(trials) is not None


def test_a_larger_budget_reopens_what_ran_out(storage):
    """What ran out under a smaller cap may fit under a larger one, so it is tried; what fitted is not repeated."""
    small, large = Device(cap_bytes=5 * GiB), Device(cap_bytes=100 * GiB)
    search(ALL, small.evaluate, cap_bytes=5 * GiB, storage=storage, study_name="s")
    best = best_trial(search(ALL, large.evaluate, cap_bytes=100 * GiB, storage=storage, study_name="s"))
    assert best is not None
    assert best.candidate.micro_batch_size == 512
    assert not set(large.calls) & {c for c in small.calls if affine_bytes(c) <= 5 * GiB}


def test_a_smaller_budget_takes_back_what_fitted(storage):
    """What fitted under a larger cap is over budget where its peak is above today's."""
    device = Device(cap_bytes=100 * GiB)
    search(ALL, device.evaluate, cap_bytes=100 * GiB, storage=storage, study_name="s")
    device.cap_bytes = 5 * GiB
    trials = search(ALL, device.evaluate, cap_bytes=5 * GiB, storage=storage, study_name="s")
    best = best_trial(trials)
    assert best is not None
    assert affine_bytes(best.candidate) <= 5 * GiB
    assert trials[0].outcome == "over_budget"
    assert "held" in trials[0].message
    assert len(set(device.calls)) == len(device.calls)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError("broken"), SystemExit])
def test_an_exception_passes_and_leaves_nothing_running(storage, error):
    """Whatever evaluate raises reaches the caller; the trial is closed as FAIL and its candidate can be tried again."""
    device = Device(cap_bytes=CAP)

    def evaluate(candidate: Candidate) -> Trial:
        if len(device.calls) == 2:
            raise error
        return device.evaluate(candidate)

    with pytest.raises(error if isinstance(error, type) else type(error)):
        search(ALL, evaluate, cap_bytes=CAP, storage=storage, study_name="s")
    trials = stored(storage)
    assert [t.state.is_finished() for t in trials] == [True] * 3
    assert trials[-1].state is TrialState.FAIL
    interrupted = Candidate.model_validate(trials[-1].user_attrs["asked"]["candidate"])
    search(ALL, device.evaluate, cap_bytes=CAP, storage=storage, study_name="s")
    assert device.calls[2] == interrupted


def test_an_exception_of_the_predictor_leaves_nothing_running(storage):
    """A predictor that raises does so before a trial begins."""

    def predict(candidate: Candidate) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        search(ALL, Device().evaluate, cap_bytes=CAP, predict=predict, storage=storage, study_name="s")
    assert stored(storage) == []


WORKER = """
import os, sys, time
sys.path.insert(0, {folder!r})
from simulated import Device, space
from autofit.search import search
from autofit.search.ledger import under_cap

device = Device(cap_bytes={cap})

def evaluate(candidate):
    print(candidate, flush=True)
    if {dies}:
        os._exit(1)
    time.sleep(0.05)
    return device.evaluate(candidate)

search(space(modes=("none", "full")), evaluate, cap_bytes={cap}, storage={storage!r}, study_name="s")
"""


def start_worker(storage: str, *, dies: bool) -> subprocess.Popen[str]:
    """Another process that searches in the same study, and prints what it tries."""
    code = WORKER.format(folder=str(Path(__file__).parent), cap=CAP, dies=dies, storage=storage)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_a_trial_left_running_by_a_dead_process_is_tried_again(storage):
    """A killed process leaves a trial RUNNING; who continues closes it and tries its candidate first."""
    printed, _ = start_worker(storage, dies=True).communicate(timeout=60)
    assert [t.state for t in stored(storage)] == [TrialState.RUNNING]
    device = Device(cap_bytes=CAP)
    search(ALL, device.evaluate, cap_bytes=CAP, storage=storage, study_name="s")
    assert str(device.calls[0]) == printed.strip()
    assert TrialState.RUNNING not in {t.state for t in stored(storage)}
    assert [t.state for t in stored(storage)].count(TrialState.FAIL) == 1


def test_a_candidate_that_kills_its_process_is_left_alone(storage):
    """After two deaths on the same candidate the search goes on without it."""
    printed = {start_worker(storage, dies=True).communicate(timeout=60)[0].strip() for _ in range(2)}
    assert len(printed) == 1
    device = Device(cap_bytes=CAP)
    trials = search(ALL, device.evaluate, cap_bytes=CAP, storage=storage, study_name="s")
    assert not printed & {str(c) for c in device.calls}
    assert best_trial(trials) is not None


def test_two_processes_share_a_study(tmp_path):
    """Two workers that open a new study together try no candidate twice, and both end."""
    storage = f"sqlite:///{tmp_path / 'new.db'}"
    workers = [start_worker(storage, dies=False) for _ in range(2)]
    printed = [worker.communicate(timeout=60)[0].splitlines() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    tried = Counter(printed[0] + printed[1])
    assert tried
    assert max(tried.values()) == 1
    assert all(t.state.is_finished() for t in stored(storage))


def test_a_candidate_that_runs_elsewhere_is_skipped(storage):
    """While another thread of this process runs the first candidate, this one tries others."""
    busy, release = threading.Event(), threading.Event()
    device = Device(cap_bytes=CAP)

    def slow(candidate: Candidate) -> Trial:
        busy.set()
        release.wait(timeout=30)
        return device.evaluate(candidate)

    arguments = {"cap_bytes": CAP, "storage": storage, "study_name": "s"}
    other = threading.Thread(target=search, args=(ALL, slow), kwargs=arguments | {"max_trials": 1})
    other.start()
    busy.wait(timeout=30)
    quick = Device(cap_bytes=CAP)
    search(ALL, quick.evaluate, **arguments)
    release.set()
    other.join(timeout=30)
    assert len(device.calls) == 1
    assert quick.calls
    assert device.calls[0] not in quick.calls


def test_a_trial_that_says_nothing_is_waited_for_once(storage, monkeypatch):
    """A worker that died before it wrote down its candidate holds the others up for a moment, not at every trial."""
    monkeypatch.setattr("autofit.search.ledger.CLAIM_WAIT_SECONDS", 0.2)
    backend = optuna.storages.RDBStorage(storage)
    optuna.create_study(storage=backend, study_name="s", direction="maximize").ask()
    backend.remove_session()
    backend.engine.dispose()
    pauses: list[float] = []
    monkeypatch.setattr("autofit.search.ledger.time.sleep", lambda s: (pauses.append(s), threading.Event().wait(s)))
    trials = search(ALL, Device(cap_bytes=CAP).evaluate, cap_bytes=CAP, storage=storage, study_name="s")
    assert best_trial(trials) is not None
    assert 0 < sum(pauses) < 0.4


@pytest.mark.parametrize(
    ("change", "age", "alive"),
    [
        ({}, timedelta(0), False),
        ({"thread": -1}, timedelta(0), False),
        ({"process": 2**22 + 1}, timedelta(0), False),
        ({"process": 1, "thread": -1}, 2 * GIVE_UP_AFTER, True),
        ({"host": "elsewhere"}, GIVE_UP_AFTER / 2, True),
        ({"host": "elsewhere"}, 2 * GIVE_UP_AFTER, False),
    ],
    ids=["this thread", "ended thread", "ended process", "living process", "other machine", "other machine, long ago"],
)
def test_who_is_alive(change, age, alive):
    """Threads and processes of this machine are asked; other machines get an hour."""
    assert is_alive(describe_worker() | change, started=datetime.now() - age) is alive


def test_a_living_thread_is_alive():
    """Another thread of this process counts as a worker as long as it runs."""
    found: list[dict[str, str | int]] = []
    release = threading.Event()

    def work() -> None:
        found.append(describe_worker())
        release.wait(timeout=30)

    thread = threading.Thread(target=work)
    thread.start()
    while not found:
        time.sleep(0.001)
    assert is_alive(found[0], started=datetime.now())
    release.set()
    thread.join()
    assert not is_alive(found[0], started=datetime.now())


def test_a_study_that_minimises_is_refused(storage):
    """A study of the same name with another goal is somebody else's."""
    backend = optuna.storages.RDBStorage(storage)
    optuna.create_study(storage=backend, study_name="s", direction="minimize")
    backend.remove_session()
    backend.engine.dispose()
    with pytest.raises(ConfigError, match="minimises"):
        search(ALL, Device().evaluate, storage=storage, study_name="s")


@pytest.fixture
def shown() -> Iterator[io.StringIO]:
    """What a handler of Optuna's logger shows."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger("optuna").addHandler(handler)
    yield stream
    logging.getLogger("optuna").removeHandler(handler)


def test_silence(storage, shown, capsys):
    """A search prints nothing, and leaves Optuna's verbosity and handlers as they were."""
    logger = logging.getLogger("optuna")
    before = logger.level, logger.propagate, [(h, list(h.filters)) for h in logger.handlers]
    search(ALL, Device(cap_bytes=CAP).evaluate, cap_bytes=CAP, storage=storage, study_name="s")
    search(ALL, Device(cap_bytes=CAP).evaluate, cap_bytes=CAP)
    assert shown.getvalue() == ""
    assert capsys.readouterr() == ("", "")
    assert (logger.level, logger.propagate, [(h, list(h.filters)) for h in logger.handlers]) == before


def test_optuna_speaks_up_for_others(shown):
    """What the caller's own studies log while a search runs is not swallowed."""

    def evaluate(candidate: Candidate) -> Trial:
        optuna.create_study(study_name="the caller's own")
        return fitted(candidate, seconds=affine_seconds(candidate))

    search(ALL, evaluate, max_trials=1)
    assert "the caller's own" in shown.getvalue()


def test_quiet_is_for_notices_of_this_thread(shown):
    """Warnings are shown, and so is what other threads log meanwhile."""
    logger = logging.getLogger("optuna.study.study")
    with quiet():
        logger.info("a notice")
        logger.warning("a warning")
        other = threading.Thread(target=logger.info, args=("another thread",))
        other.start()
        other.join()
    assert shown.getvalue().splitlines() == ["a warning", "another thread"]


def test_a_damaged_trial_is_ignored(storage):
    """A trial that cannot be read, say of another version, is skipped, and the search goes on."""
    search(ALL, lambda c: ran_out(c), max_trials=1, storage=storage, study_name="s")
    backend = optuna.storages.RDBStorage(storage)
    study = optuna.load_study(study_name="s", storage=backend)
    study.add_trial(
        optuna.trial.create_trial(value=1.0, user_attrs={"asked": {"candidate": {"micro_batch_size": "many"}}})
    )
    study.add_trial(optuna.trial.create_trial(value=1.0))
    backend.remove_session()
    backend.engine.dispose()
    trials = search(ALL, Device(cap_bytes=CAP).evaluate, cap_bytes=CAP, storage=storage, study_name="s")
    assert best_trial(trials) is not None
    assert {1, 2}.isdisjoint(t.number for t in trials)
