"""The command line with a tune() that answers at once, and what it was called with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import autofit
import autofit.cli.models.torchvision_zoo  # here: importing torch's compiler sets an environment variable
from autofit.cli.app import main
from autofit.plan import Plan, Trial
from autofit.progress import Progress

PLANS = Path(__file__).parents[1] / "report" / "golden"
PLAN = Plan.load(PLANS / "cpu.json").model_copy(update={"notes": ()})


@dataclass
class FakeTune:
    """Stands for `autofit.tune`: remembers the call, reports the plan's trials, then returns or raises `answer`."""

    answer: Plan | BaseException = PLAN
    trials: tuple[Trial, ...] = PLAN.trials
    calls: list[dict[str, Any]] = field(default_factory=list)
    during: Callable[[], None] = lambda: None

    def tune(
        self,
        model: Any,
        sample_batch: Any,
        *,
        target_batch: int,
        loss_fn: Any = None,
        compute_loss: Any = None,
        optimizer: Any = None,
        device: Any = None,
        budget: Any = None,
        space: Any = None,
        batch_dims: Any = None,
        max_trials: Any = None,
        timeout: Any = None,
        seed: int = 0,
        storage: Any = None,
        study_name: Any = None,
        on_trial: Any = None,
        on_progress: Any = None,
        cache: Any = None,
    ) -> Plan:
        """The signature that factories are checked against."""
        self.calls.append({key: value for key, value in locals().items() if key != "self"})
        self.during()
        on_progress(Progress("checking the model"))
        on_progress(Progress("predicting memory", self.trials[0].candidate))
        for trial in self.trials:
            on_trial(trial)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    @property
    def call(self) -> dict[str, Any]:
        """The arguments of the only call."""
        (call,) = self.calls
        return call


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTune:
    """Puts a fake in the place of `autofit.tune`."""
    made = FakeTune()
    monkeypatch.setitem(vars(autofit), "tune", made.tune)
    return made


@dataclass(frozen=True)
class Finished:
    """A command line that ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """Runs the command line in this process."""

    def run(*arguments: str) -> Finished:
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        captured = capsys.readouterr()
        return Finished(int(exit_.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder for the user's own files; what importing them leaves in `sys` is undone."""
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
