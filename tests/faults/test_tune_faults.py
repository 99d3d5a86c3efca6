"""tune() while things fail in it: a finished plan or a typed error, and nothing changed or left behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import autofit
from autofit.candidate import SearchSpace
from autofit.errors import AutofitError
from tests.faults import tally
from tests.faults.injectors import ERRORS, PLACES, Fault, spread
from tests.faults.subjects import SUBJECTS
from tests.faults.surroundings import Surroundings
from tests.states import FullState

pytestmark = pytest.mark.usefixtures("quick", "frozen_heap")

INTERRUPTS = {"interrupt": KeyboardInterrupt, "signal": KeyboardInterrupt, "exit": SystemExit}
# Which errors can come from where.
FAULTS = {
    "operator": ("memory", "host memory", "runtime", "interrupt", "exit"),
    "allocation": ("memory", "interrupt"),
    "optimizer": ("memory", "runtime", "exit"),
    "file": ("disk", "host memory", "interrupt"),
    "storage": ("storage", "disk", "interrupt"),
    "line": ("signal",),
}
CASES = [(place, error) for place, errors in FAULTS.items() for error in errors]


def tune(subject: tuple[Any, Any, Any], folder: Path, place: str) -> autofit.Plan:
    """Two trials; with a study on disk or a folder of plans where these are to fail."""
    model, optimizer, batch = subject
    return autofit.tune(
        model,
        batch,
        optimizer=optimizer,
        target_batch=4,
        device="cpu",
        budget="24MiB",
        max_trials=2,
        space=SearchSpace(precision="float32"),
        storage=f"sqlite:///{folder}/study.db" if place == "storage" else None,
        cache=folder / "plans" if place == "file" else None,
    )


def disturbed(subject: str, place: str, fault: Fault, folder: Path) -> tuple[str, list[str]]:
    """How tune() ended with this fault in it, and what is not what it was."""
    made = SUBJECTS[subject]()
    before, around = FullState(made[0], made[1]), Surroundings()
    error: BaseException | None = None
    try:
        with PLACES[place](fault):
            tune(made, folder, place)
    except (Exception, KeyboardInterrupt, SystemExit) as raised:
        raised.__traceback__ = None
        error = raised
    ended = "plan" if error is None else "typed error" if isinstance(error, AutofitError) else type(error).__name__
    del error
    return ended, before.differences(made[0], made[1]) + around.differences()


@contextmanager
def silent_logs() -> Iterator[None]:
    """Hundreds of failures are not to fill the report."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def sweep(subject: str, place: str, error: str, points: int, folder: Path) -> None:
    """Lets `error` strike at so many points of one tune(), spread over all that it has."""
    counting = Fault()
    allowed = {"plan", "typed error"} if error not in INTERRUPTS else {INTERRUPTS[error].__name__}
    with silent_logs():
        disturbed(subject, place, counting, _folder(folder, "warm"))  # caches fill
        counting.seen = 0
        disturbed(subject, place, counting, _folder(folder, "count"))
        assert counting.seen > 0
        for at in spread(counting.seen, points):
            fault = Fault(ERRORS[error], at=at)
            ended, differences = disturbed(subject, place, fault, _folder(folder, str(at)))
            assert not differences, f"{error} at {place} {at} of {counting.seen} -> {ended}: {differences[:5]}"
            if fault.struck:  # timing decides how many steps there are, so the last points may not be reached
                assert ended in allowed, f"{error} at {place} {at} of {counting.seen} -> {ended}"
                tally.ENDED[ended] += 1


def _folder(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


@pytest.mark.usefixtures("unpredicted")
@pytest.mark.parametrize(("place", "error"), CASES)
def test_a_few_faults(place: str, error: str, tmp_path: Path) -> None:
    """Every kind of fault, at a few points."""
    sweep("conv", place, error, 5, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize(("place", "error"), CASES)
def test_faults_everywhere(subject: str, place: str, error: str, tmp_path: Path) -> None:
    """Every kind of fault at many points, those of the predictions included."""
    sweep(subject, place, error, 25, tmp_path)


def test_a_fault_strikes_once(tmp_path: Path) -> None:
    """The injectors themselves: a fault that is due does strike, at its place, and what comes out is it."""
    fault = Fault(ERRORS["exit"], at=1)
    with pytest.raises(SystemExit) as caught, PLACES["operator"](fault):
        tune(SUBJECTS["conv"](), tmp_path, "operator")
    assert caught.value.code == 7
    assert fault.struck
    unharmed = Fault(ERRORS["exit"], at=10**9)
    with PLACES["line"](unharmed):
        autofit.Candidate(micro_batch_size=1, accumulation_steps=1).split(1)
    assert unharmed.seen > 0
    assert not unharmed.struck


@pytest.mark.usefixtures("unpredicted")
def test_what_a_callback_raises_is_the_callers(tmp_path: Path) -> None:
    """An error of `on_trial` comes out as it is, also one of a kind that autofit would give a type of its own."""
    model, _, batch = SUBJECTS["conv"]()
    mine = RuntimeError("enough")

    def stop(trial: autofit.Trial) -> None:
        raise mine

    with pytest.raises(RuntimeError) as caught:
        autofit.tune(model, batch, target_batch=4, device="cpu", on_trial=stop)
    assert caught.value is mine
