"""Hugging Face Trainer: its arguments from a plan, and a callback that holds the training to it."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from autofit.errors import InfeasibleError
from autofit.integrations.even import even_split
from autofit.plan import Plan
from autofit.step.checkpointing import CheckpointPlan
from autofit.units import format_bytes

try:
    from transformers import TrainerCallback, TrainingArguments
except ImportError as error:
    raise ImportError(f"The Trainer needs transformers: pip install 'torch-autofit[hf]' ({error})") from error

logger = logging.getLogger(__name__)

# transformers 5 renamed it; the old name warns there.
_NAMES = {field.name for field in dataclasses.fields(TrainingArguments)}
_CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in _NAMES else "gradient_checkpointing"
_WATCHED = ("per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16")


def training_arguments(plan: Plan) -> dict[str, Any]:
    """Arguments of `TrainingArguments` that train as the plan's best trial does.

    Batch size, accumulation, precision, checkpointing, and the kind of device. With checkpointing, the Trainer's own is
    switched on: every layer that transformers marks; `PlanCallback` puts the plan's blocks in its place. Clipping, the
    optimizer and its schedule stay yours. How micro-batches are weighted is the Trainer's own affair: of some models it
    adds the losses up instead of averaging them. Raises ConfigError when the plan's micro-batches are not all equal.
    """
    size, steps = even_split(plan, "the Trainer")
    candidate = plan.candidate
    kind = torch.device(plan.environment.device).type
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": steps,
        "bf16": candidate.precision == "bfloat16",
        "fp16": candidate.precision == "float16",
        _CHECKPOINTING: candidate.checkpointing.mode != "none",
        "use_cpu": kind == "cpu",
    }
    if arguments[_CHECKPOINTING]:
        arguments[f"{_CHECKPOINTING}_kwargs"] = {"use_reentrant": False}
    if kind == "cuda" and candidate.precision in ("float32", "tf32"):
        arguments["tf32"] = candidate.precision == "tf32"
    return arguments


class PlanCallback(TrainerCallback):
    """Holds a Trainer to a plan: `Trainer(…, callbacks=[PlanCallback(plan)])`.

    When training begins, arguments that differ from the plan's are logged as warnings, and the plan's checkpointing is
    put in force, exactly its blocks, until training ends. With a `sample_batch` (and `check_options`, as of
    `Plan.check`) the plan's step is run once before: `check` holds the result, and InfeasibleError is raised when it
    does not fit. On an accelerator a peak above the plan's cap is logged once.
    """

    def __init__(self, plan: Plan, *, sample_batch: Any = None, **check_options: Any) -> None:
        self.plan = plan
        self.check: Any = None
        self._sample_batch = sample_batch
        self._check_options = check_options
        self._in_force = ExitStack()
        self._said = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Compares, checks, and puts checkpointing in force."""
        self.close()
        for name, value in training_arguments(self.plan).items():
            if name in _WATCHED and getattr(args, name) != value:
                logger.warning("%s is %s, the plan was made for %s", name, getattr(args, name), value)
        if self._sample_batch is not None:
            self._verify(model, others.get("optimizer"))
        if self.plan.candidate.checkpointing.mode != "none":
            _disable_own_checkpointing(model)
            self._in_force.enter_context(CheckpointPlan(model, self.plan.candidate.checkpointing).active())

    def _verify(self, model: nn.Module, optimizer: Any) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        self.check = self.plan.check(model, self._sample_batch, **{"optimizer": inner, **self._check_options})
        for difference in self.check.differences:
            logger.warning("the plan was made elsewhere: %s", difference)
        if not self.check.holds:
            raise InfeasibleError(
                f"The plan does not fit here any more: {self.check.trial.message} Tune again.",
                budget_bytes=self.check.budget_bytes,
                smallest_peak_bytes=self.check.trial.peak_reserved_bytes,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Says once when the device holds more than the plan allows."""
        if self._said or args.device.type not in ("cuda", "xpu"):
            return
        peak = torch.accelerator.max_memory_reserved()
        if peak > self.plan.cap_bytes:
            self._said = True
            logger.warning(
                "%s reserved on the device after step %d, above the plan's cap of %s",
                format_bytes(peak),
                state.global_step,
                format_bytes(self.plan.cap_bytes),
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The model is again what it was."""
        self.close()

    def close(self) -> None:
        """Undoes the checkpointing; call it when training ended with an exception, which the Trainer does not tell."""
        self._in_force.close()


def _disable_own_checkpointing(model: Any) -> None:
    """Switches off what the Trainer switched on by `training_arguments`, or blocks would be recomputed twice."""
    for name in ("activation_checkpointing_disable", "gradient_checkpointing_disable"):
        disable = getattr(model, name, None)
        if disable is not None:
            disable()
            return
