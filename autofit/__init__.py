"""autofit: the fastest way to train a PyTorch model at the batch you asked for, inside the memory you have.

plan = autofit.tune(model, sample_batch, target_batch=512)
step = plan.train_step(model, optimizer)

Names are imported when they are first used, so that `import autofit` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autofit._version import __version__

if TYPE_CHECKING:
    from autofit import errors
    from autofit.candidate import Candidate, Checkpointing, SearchSpace
    from autofit.forecaster import forecast
    from autofit.plan import Plan, Trial
    from autofit.predict import MemoryPrediction, predict_memory
    from autofit.step import TrainStep
    from autofit.tuner import tune

__all__ = [
    "tune",
    "forecast",
    "predict_memory",
    "TrainStep",
    "Plan",
    "Trial",
    "Candidate",
    "Checkpointing",
    "SearchSpace",
    "MemoryPrediction",
    "errors",
    "__version__",
]

_HOMES = {
    "tune": "autofit.tuner",
    "forecast": "autofit.forecaster",
    "predict_memory": "autofit.predict",
    "MemoryPrediction": "autofit.predict",
    "TrainStep": "autofit.step",
    "Plan": "autofit.plan",
    "Trial": "autofit.plan",
    "Candidate": "autofit.candidate",
    "Checkpointing": "autofit.candidate",
    "SearchSpace": "autofit.candidate",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("autofit.errors")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'autofit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
