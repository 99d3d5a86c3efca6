"""The training step, and what it is made of: precision, checkpointing, accumulation."""

from autofit.step.train_step import StepResult, TrainStep

__all__ = ["StepResult", "TrainStep"]
