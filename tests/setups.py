"""What a trial needs, for tests of trials and of what is made of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autofit.batch import infer_layout
from autofit.candidate import Candidate
from autofit.memory import meter_for
from autofit.optimizers import optimizer_factory
from autofit.trial import TrialSetup
from autofit.units import MiB
from tests.models import image_batch

CPU = torch.device("cpu")
SAMPLES = 12


def make_setup(model: nn.Module, snapshot: Any, **values: Any) -> TrialSetup:
    """The setup of 12 samples per step on the CPU under 64 MiB, with `values` in place of its own."""
    batch = values.pop("batch", None) or image_batch()
    settings: dict[str, Any] = {
        "model": model,
        "sample_batch": batch,
        "layout": infer_layout(batch),
        "samples": SAMPLES,
        "device": CPU,
        "meter": meter_for(CPU),
        "cap_bytes": 64 * MiB,
        "outside_bytes": 0,
        "snapshot": snapshot,
        "make_optimizer": optimizer_factory(None, model),
    }
    return TrialSetup(**{**settings, **values})


def candidate(size: int, **values: Any) -> Candidate:
    """The split of 12 samples into micro-batches of `size`."""
    return Candidate(micro_batch_size=size, accumulation_steps=-(-SAMPLES // size), **values)
