"""Trials that take no time, a heap that is quick to search, and the counts at the end."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import autofit.finals
import autofit.timing
import autofit.tuner
from tests.faults import tally


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round of one micro-step is measure enough where nobody looks at the times."""
    for name in ("ENOUGH_SECONDS", "PATIENCE_SECONDS", "MIN_SAMPLE_SECONDS"):
        monkeypatch.setattr(autofit.timing, name, 0.0)
    monkeypatch.setattr(autofit.timing, "MIN_SAMPLES", 1)
    monkeypatch.setattr(autofit.timing, "MAX_SAMPLES", 2)
    monkeypatch.setattr(autofit.finals, "TURNS", 1)
    monkeypatch.setattr(autofit.finals, "TURN_SECONDS", 0.0)


@pytest.fixture
def unpredicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """tune() without predictions, which take most of its time on tiny models."""
    monkeypatch.setattr(autofit.tuner, "_predictor", lambda *_: None)


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """What was imported is not looked through by every one of hundreds of garbage collections."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how much was tried."""
    for line in tally.lines():
        terminalreporter.write_line(line)
