"""The same command under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autofit.errors import ConfigError
from autofit.plan import Plan

pytestmark = pytest.mark.distributed

FACTORY = """
import torch
from torch import nn

def tiny():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    return {"model": model, "sample_batch": (torch.randn(4, 8), torch.randint(0, 4, (4,)))}
"""


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Two ranks of the command line, on the CPU."""
    (folder / "tiny.py").write_text(FACTORY)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "autofit", *arguments]
    search = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}
    environment = {**os.environ, **search, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", timeout=200, check=False
    )


def model_in(folder: Path) -> list[str]:
    return ["--model", f"{folder}/tiny.py:tiny", "--device", "cpu", "--budget", "100MiB"]


def tuned_in(folder: Path) -> subprocess.CompletedProcess[str]:
    options = ["--target-batch", "15", "--max-trials", "2", "--json", "--out", "plan.json"]
    return torchrun(folder, *model_in(folder), *options)


def test_the_same_command_under_torchrun(tmp_path: Path) -> None:
    """Rank 0 alone speaks and writes; the target is met over both."""
    tuned = tuned_in(tmp_path)
    assert tuned.returncode == 0, tuned.stderr
    plan = Plan.from_json(tuned.stdout)
    assert plan == Plan.load(tmp_path / "plan.json")
    assert plan.world_size == 2
    assert max(trial.candidate.micro_batch_size for trial in plan.trials) == 8
    assert tuned.stderr.count("15 samples per optimizer step over 2 ranks") == 1


@pytest.mark.slow
def test_a_plan_of_several_ranks_is_checked_under_torchrun(tmp_path: Path) -> None:
    """On as many ranks as it was made for; on its own a process is told how."""
    assert tuned_in(tmp_path).returncode == 0
    checked = torchrun(tmp_path, "check", "plan.json", *model_in(tmp_path))
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.count("The plan holds") == 1
    plan = Plan.load(tmp_path / "plan.json")
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    with pytest.raises(ConfigError, match="--nproc-per-node 2"):
        plan.check(model, (torch.randn(4, 8), torch.randint(0, 4, (4,))))
