"""One optimizer step in parts: micro-batches, their weights, precision, checkpointing, and accumulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from autofit.batch import BatchLayout, infer_layout, to_device
from autofit.candidate import Candidate, balanced
from autofit.errors import ConfigError
from autofit.loss import Weighting, resolve_loss, resolve_weighting
from autofit.step.checkpointing import CheckpointPlan
from autofit.step.parallel import parallel
from autofit.step.precision import StepPrecision

Phase = Literal["forward", "backward", "optimizer"]
Backward = Callable[[list[torch.Tensor]], None]


def run_engine(loss: list[torch.Tensor]) -> None:
    """Backward by the autograd engine. The loss comes in a list that gives it up, so that nothing else holds it."""
    loss.pop().backward()  # type: ignore[no-untyped-call]


class LossOptions(TypedDict, total=False):
    """What the loss of a batch is, as `autofit.tune` is told."""

    loss_fn: Callable[..., Any] | None
    compute_loss: Callable[..., Any] | None
    loss_weight: Callable[[Any], Any] | Literal["samples", "sum"] | None
    batch_dims: Any


class StepOptions(LossOptions, total=False):
    """What a step may be told beyond model, optimizer and candidate; see `TrainStep`."""

    max_grad_norm: float | None
    device: torch.device | None
    backward: Backward
    process_group: ProcessGroup | None


class Part(NamedTuple):
    """One micro-batch: views of the batch's samples, how many, the factor of its loss, and what it weighs."""

    batch: Any
    samples: int
    coefficient: float
    weight: float = 1.0


class Accumulation:
    """The parts of a training step, to be run one by one inside `activated()`.

    `phase` says what is running or ran last. Arguments as of `TrainStep`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        candidate: Candidate,
        *,
        loss_fn: Callable[..., Any] | None = None,
        compute_loss: Callable[..., Any] | None = None,
        loss_weight: Callable[[Any], Any] | Literal["samples", "sum"] | None = None,
        batch_dims: Any = None,
        max_grad_norm: float | None = None,
        device: torch.device | None = None,
        backward: Backward = run_engine,
        process_group: ProcessGroup | None = None,
    ) -> None:
        if max_grad_norm is not None and not (isinstance(max_grad_norm, Real) and max_grad_norm > 0):
            raise ConfigError(
                f"max_grad_norm must be a positive number, got {max_grad_norm!r}. Leave it out not to clip."
            )
        self.model = model
        self.optimizer = optimizer
        self.candidate = candidate
        self.phase: Phase = "forward"
        self._device = device or next(model.parameters()).device
        self._loss = resolve_loss(loss_fn=loss_fn, compute_loss=compute_loss)
        self._loss_fn, self._compute_loss, self._loss_weight = loss_fn, compute_loss, loss_weight
        self._batch_dims = batch_dims
        self._max_grad_norm = max_grad_norm
        self._backward = backward
        self._precision = StepPrecision(candidate.precision, self._device)
        self._checkpoints = CheckpointPlan(model, candidate.checkpointing)
        self._parallel = parallel(model, candidate, group=process_group)
        self._layout: BatchLayout | None = None
        self._weighting: Weighting | None = None
        self._last: tuple[Any, int | None] | None = None
        self._last_candidate: Candidate | None = None

    @property
    def scaler(self) -> GradScaler | None:
        """The gradient scaler of float16; None in other precisions."""
        return self._precision.scaler

    def split(self, batch: Any, *, at_most: int | None = None) -> list[Part]:
        """The batch as micro-batches, without those whose loss counts nothing; smaller than the plan's if asked."""
        shape = _shape_of(batch)
        if shape is None or self._last != (shape, at_most) or self._last_candidate is not self.candidate:
            self._split = self._sizes_of(batch, at_most)
            self._last, self._last_candidate = (shape, at_most), self.candidate
        layout, weighting, sizes = self._split
        if sizes[-1] == 1 < sum(sizes) and self._needs_two(remainder=sizes[0] > 1):
            sizes = balanced(sum(sizes), sum(sizes) // 2)
        batches = layout.root.split(batch, sizes)
        if self.candidate.parallelism.mode == "none" or weighting.kind == "sum":
            coefficients = weighting.coefficients(batches, sizes, batch=batch)
            return [Part(b, n, c) for b, n, c in zip(batches, sizes, coefficients, strict=True) if c != 0]
        weights = weighting.weights(batches, sizes, batch=batch)
        total = math.fsum(weights) or 1.0  # all ranks are told together where one rank's weigh nothing: see `begin`
        weighed = zip(batches, sizes, weights, strict=True)
        return [Part(b, n, w / total, w) for b, n, w in weighed if w] or [Part(batches[0], sizes[0], 0.0, 0.0)]

    def begin(self, parts: Sequence[Part]) -> None:
        """Before the first micro-batch of a step of these: the ranks, where there are several, weigh theirs."""
        summed = self._weighting is not None and self._weighting.kind == "sum"
        self._parallel.begin([part.weight for part in parts], summed=summed)

    def _needs_two(self, *, remainder: bool) -> bool:
        """Whether no micro-batch may have one sample, of which there is no variance.

        Where only a remainder would, under any BatchNorm; where all would, only under that of vectors, since of images
        the pixels have a variance.
        """
        kind = nn.modules.batchnorm._BatchNorm if remainder else nn.BatchNorm1d
        chosen = not remainder and self.candidate.micro_batch_size == 1
        return not chosen and any(isinstance(module, kind) and module.training for module in self.model.modules())

    def _sizes_of(self, batch: Any, at_most: int | None) -> tuple[BatchLayout, Weighting, tuple[int, ...]]:
        layout, weighting = self._read(batch)
        samples = layout.samples_in(batch)
        if at_most is None or at_most >= self.candidate.micro_batch_size:
            return layout, weighting, self.candidate.split(samples)
        return layout, weighting, balanced(samples, -(-samples // at_most))

    def _read(self, batch: Any) -> tuple[BatchLayout, Weighting]:
        if self._layout is None or self._weighting is None or not self._layout.matches(batch):
            self._layout = infer_layout(batch, batch_dims=self._batch_dims)
            self._weighting = resolve_weighting(
                batch,
                loss_fn=self._loss_fn,
                compute_loss=self._compute_loss,
                loss_weight=self._loss_weight,
                model=self.model,
            )
        return self._layout, self._weighting

    @contextmanager
    def activated(self) -> Iterator[None]:
        """Precision switches and checkpointing, in force inside and undone on exit."""
        with self._precision.activated(), self._checkpoints.active():
            yield

    def put_back(self) -> None:
        """Undoes what an interrupt left when it came while `activated()` was being undone; gradients are dropped."""
        self._checkpoints.undo()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drops all gradients, freeing their memory, or where ranks exchange them in buckets keeping only those."""
        self._parallel.end()
        self.optimizer.zero_grad(set_to_none=True)

    def micro_step(self, part: Part, *, last: bool = True) -> torch.Tensor:
        """Forward and backward of one micro-batch; its share of the batch's loss, 0-dim and detached.

        Ranks exchange gradients in the `last` of a step.
        """
        self.phase = "forward"
        with self._parallel.micro_step(last=last):
            return self._micro_step(part)

    def _micro_step(self, part: Part) -> torch.Tensor:
        # The transferred batch lives until backward is done, as it does in a loop that is written by hand.
        batch = self._transferred(part.batch)
        loss = self._loss_of(self._parallel.module(), batch, part.coefficient * self._parallel.factor)
        share = loss.detach()
        scaler = self.scaler
        pending = [loss if scaler is None else scaler.scale(loss)]
        del loss
        self.phase = "backward"
        self._backward(pending)
        return share

    def _transferred(self, batch: Any) -> Any:
        """The micro-batch on the device.

        Where storages of the host are counted or faked, a copy takes the place of the transfer, so that a micro-batch
        costs its bytes on every device.
        """
        if self._device.type != "cpu":
            return to_device(batch, self._device)
        counted = torch._C._len_torch_dispatch_stack() > 0
        if type(batch) is tuple and not counted and all(type(leaf) is torch.Tensor and leaf.is_cpu for leaf in batch):
            return batch  # the most common batch, at once: this is run for every micro-batch
        return to_device(batch, self._device, copy=counted)

    def _loss_of(self, module: nn.Module, batch: Any, coefficient: float) -> torch.Tensor:
        self.phase = "forward"
        with self._precision.forward():
            loss = self._loss(module, batch)
        return loss if coefficient == 1 else loss * coefficient

    def loss_share(self, part: Part) -> torch.Tensor:
        """The loss of one micro-batch, weighted as its share of the batch's loss, without backward."""
        return self._loss_of(self.model, to_device(part.batch, self._device), part.coefficient)

    def optimizer_step(self) -> torch.Tensor | None:
        """Unscales, clips and steps on the accumulated gradients; the norm before clipping, if clipped."""
        self.phase = "optimizer"
        scaler = self.scaler
        norm = None
        if self._max_grad_norm is not None:
            if scaler is not None:
                scaler.unscale_(self.optimizer)
            norm = nn.utils.clip_grad_norm_(self._parameters(), self._max_grad_norm)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        return norm

    def _parameters(self) -> Sequence[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


def _shape_of(batch: Any) -> Any:
    """What decides how a flat batch of plain tensors is split, for batch after batch of the same; None for others."""
    kind = type(batch)
    if kind is dict:
        names: Any = tuple(batch)
        tensors: Any = batch.values()
    elif kind is tuple or kind is list:
        names, tensors = len(batch), batch
    else:
        return None
    shapes = [tensor.shape for tensor in tensors if type(tensor) is torch.Tensor]
    return (kind, names, shapes) if len(shapes) == len(batch) else None
