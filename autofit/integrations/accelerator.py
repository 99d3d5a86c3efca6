"""Accelerate: the arguments of its `Accelerator` from a plan.

A plan's own step works with what `Accelerator.prepare` returns on one device; these are for loops that are written
with `accelerator.accumulate`.
"""

from __future__ import annotations

from typing import Any

import torch

from autofit.integrations.even import even_split
from autofit.plan import Plan

_PRECISIONS = {"float32": "no", "tf32": "no", "bfloat16": "bf16", "float16": "fp16"}


def accelerator_arguments(plan: Plan) -> dict[str, Any]:
    """Arguments of `Accelerator` for the plan's precision and accumulation; the loader's batch is `micro_batch_size`.

    Checkpointing is not among them: `with autofit.step.checkpointing.checkpointed(model, plan.candidate.checkpointing)`
    around the loop puts it in force. Raises ConfigError when the plan's micro-batches are not all equal.
    """
    _, steps = even_split(plan, "Accelerate")
    return {
        "mixed_precision": _PRECISIONS[plan.candidate.precision],
        "gradient_accumulation_steps": steps,
        "cpu": torch.device(plan.environment.device).type == "cpu",
    }
