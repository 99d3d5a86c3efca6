"""What tune() says of itself while it works, and what the plan knows afterwards."""

from __future__ import annotations

import torch
from torch import nn

import autofit
from autofit.progress import Progress


def test_each_part_of_the_work_is_told() -> None:
    """In order, with the candidate and its peak: predicted before it runs, measured after."""
    told: list[Progress] = []
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    batch = (torch.randn(4, 16), torch.randint(4, (4,)))
    plan = autofit.tune(
        model, batch, target_batch=64, device="cpu", budget="64MiB", max_trials=2, on_progress=told.append
    )
    stages = [progress.stage for progress in told]
    assert stages[0] == "checking the model"
    assert stages[-1] == "predicting for the report"
    metered = next(progress for progress in told if progress.stage == "measuring memory")
    timed = next(progress for progress in told if progress.stage == "measuring time")
    assert stages.index("predicting memory") < stages.index("measuring memory") < stages.index("measuring time")
    assert metered.candidate == timed.candidate == plan.trials[0].candidate
    assert metered.predicted
    assert not timed.predicted
    assert timed.peak_bytes == plan.trials[0].peak_reserved_bytes
    assert metered.cap_bytes == timed.cap_bytes == plan.cap_bytes
    assert plan.insight is not None
    assert plan.insight.best is not None
    assert plan.insight.best.candidate == plan.candidate
    assert autofit.Plan.from_json(plan.to_json()) == plan
