"""What a plan remembers of the batch and the loss that it was made for: enough to train by it, or to say what lacks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from autofit.candidate import FrozenModel

Split = int | Literal["list"] | None
Callables = Literal["loss_fn", "compute_loss", "loss_weight"]


class LossFacts(FrozenModel):
    """How batches are cut and micro-batches weighted.

    `batch_dims` and `loss_weight` as they were passed; `splits` the dim that each leaf is cut along, by its path.
    `given` are the callables that were passed, which a file cannot hold. `weighting`: micro-batches weigh by their
    samples, their losses are added (`sum`), or they weigh by their `targets` that are not `ignore_index`, of `shifted`
    ones without the first position, by `class_weights` if the loss has them; `own` is the user's `loss_weight`.
    """

    batch_dims: Split | dict[str, Split] = None
    splits: dict[str, Split] = Field(default_factory=dict)
    given: tuple[Callables, ...] = ()
    loss_weight: Literal["samples", "sum"] | None = None
    default_loss: Literal["cross_entropy", "mse_loss"] | None = None
    weighting: Literal["samples", "sum", "targets", "own"] = "samples"
    ignore_index: int = -100
    shifted: bool = False
    class_weights: bool = False
