"""Optuna's own tools read a study: its dashboard and data frames show names and figures that mean something."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from autofit.candidate import Candidate
from autofit.plan import Seconds, Trial
from autofit.search import search

MIB = 2**20
NAME = "a study"
SHOWN = ("outcome", "peak_MiB", "recomputed", "step_seconds", "samples_per_second")


def evaluate(candidate: Candidate) -> Trial:
    """Memory grows with the micro-batch, and eight samples are too many."""
    size = candidate.micro_batch_size
    if size >= 8:
        return Trial(number=0, candidate=candidate, outcome="out_of_memory", message="in backward\nTraceback")
    return Trial(
        number=0,
        candidate=candidate,
        outcome="feasible",
        peak_reserved_bytes=size * MIB,
        step_seconds=Seconds.of([1 / size]),
        samples_per_second=8.0 * size,
    )


def needed_bytes(candidate: Candidate) -> int:
    """Less than it really takes, so that the largest is tried."""
    return candidate.micro_batch_size * MIB // 2


@pytest.fixture
def storage(tmp_path: Path) -> str:
    """A database with a study of three trials."""
    url = f"sqlite:///{tmp_path / 'study.db'}"
    space = [Candidate(micro_batch_size=size, accumulation_steps=8 // size) for size in (2, 4, 8)]
    search(space, evaluate, cap_bytes=6 * MIB, predict=needed_bytes, storage=url, study_name=NAME)
    return url


def test_a_trial_is_readable_in_optuna(storage: str) -> None:
    """Parameters under their own names, figures to sort by, units in their names."""
    study = optuna.load_study(study_name=NAME, storage=storage)
    assert study.best_params == {
        "micro_batch_size": 4,
        "accumulation_steps": 2,
        "precision": "float32",
        "checkpointing": "none",
    }
    attributes = study.best_trial.user_attrs
    assert {name: attributes[name] for name in SHOWN} == {
        "outcome": "feasible",
        "peak_MiB": 4.0,
        "recomputed": "none",
        "step_seconds": 0.25,
        "samples_per_second": 32.0,
    }
    failed = next(trial for trial in study.trials if trial.params["micro_batch_size"] == 8)
    assert failed.user_attrs["message"] == "in backward"


@pytest.fixture
def dashboard(storage: str, tmp_path: Path) -> Iterator[str]:
    """The address of a running optuna-dashboard."""
    pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = "from optuna_dashboard._cli import main; main()"
    command = [sys.executable, "-c", program, storage, "--host", "127.0.0.1", "--port", str(port)]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        address = f"http://127.0.0.1:{port}"
        try:
            _wait_for(address, server, tmp_path / "log")
            yield address
        finally:
            server.terminate()


def _wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(300):
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"the dashboard does not answer: {log.read_text()}")


def answer(address: str) -> Any:
    """The JSON that the dashboard's page is made from."""
    with urllib.request.urlopen(address, timeout=30) as response:
        return json.load(response)


def test_the_dashboard_opens_the_study(dashboard: str) -> None:
    """The page is served, lists the study, and has every trial with its parameters and figures."""
    with urllib.request.urlopen(f"{dashboard}/dashboard", timeout=30) as response:
        assert response.status == 200
    (summary,) = answer(f"{dashboard}/api/studies")["study_summaries"]
    assert summary["study_name"] == NAME
    detail = answer(f"{dashboard}/api/studies/{summary['study_id']}?after=0")
    best = next(trial for trial in detail["trials"] if trial["state"] == "Complete" and trial["values"] == [32.0])
    parameters = {parameter["name"]: parameter["param_external_value"] for parameter in best["params"]}
    assert parameters["micro_batch_size"] == "4"
    shown = {attribute["key"]: attribute["value"] for attribute in best["user_attrs"]}
    assert shown["outcome"] == "feasible"
    assert float(shown["peak_MiB"]) == 4.0
    assert len(detail["trials"]) == 3
