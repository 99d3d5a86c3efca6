"""One optimizer step at the target batch: what is predicted, what a trial measures, and what the user trains with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Unpack

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.candidate import Candidate
from autofit.errors import InfeasibleError, StepError
from autofit.interrupts import uninterrupted
from autofit.oom import Failure, classify, drain_backward, headline, release_frames
from autofit.optimizers import check_optimizer
from autofit.step.accumulation import Accumulation, Part, StepOptions
from autofit.step.survival import (
    ATTEMPTS_AT_ONE,
    MicroBatchSizes,
    OomEvent,
    OptimizerStart,
    StepStart,
    release_memory,
)
from autofit.step.watch import Watch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gave.

    `loss` is the full batch's loss, 0-dim, detached, on the device and not waited for. `grad_norm` likewise, the norm
    before clipping; None without clipping. `micro_batches` are the sizes that ran.

    Where several ranks train together the loss is that of this rank's share, weighted so that the mean over the ranks
    is the loss of the whole batch.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor | None
    micro_batches: tuple[int, ...]


class TrainStep(Accumulation):
    """Trains one optimizer step per call: `for batch in loader: result = step(batch)`.

    The batch is split into the candidate's micro-batches, moved to the model's device one at a time, and weighted so
    that the accumulated gradient is the full batch's gradient. Precision and checkpointing are in force during the call
    and undone when it returns or raises. Between calls the parameters hold no gradients. `oom_events` lists each time
    that a step ran out of memory and was run again; `watch` says what goes wrong slowly.

    With a candidate that several ranks train together every rank calls the step with its own share of the batch; shares
    may differ in size, and gradients are those of the whole batch. There, running out of memory raises at once: the
    other ranks cannot wait for a step that is run again. Batches go through the wrapped model, on `process_group` (left
    out: the default one).

    `loss_fn`, `compute_loss`, `loss_weight` and `batch_dims` as in `autofit.tune`. `max_grad_norm` clips the
    accumulated gradient, once per step. `device` is where micro-batches go; by default where the model lies. `backward`
    runs backward from a one-element list that it must empty.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, candidate: Candidate, **options: Unpack[StepOptions]
    ) -> None:
        check_optimizer(optimizer, model)
        super().__init__(model, optimizer, candidate, **options)
        self.oom_events: list[OomEvent] = []
        self._sizes = MicroBatchSizes(self.candidate.micro_batch_size)
        self._evaluation_sizes = MicroBatchSizes(self.candidate.micro_batch_size)
        self._start = StepStart(self.model, self._device)
        self._optimizer_start = OptimizerStart(self.optimizer)
        self.watch = Watch(self._device)
        self._steps = 0

    def __call__(self, batch: Any) -> StepResult:
        """One optimizer step on `batch`, which may have fewer samples than the target, as the last of an epoch has.

        When memory runs out, the same batch is run again from the start of the step in smaller micro-batches, with the
        same gradient; see `oom_events`. Raises InfeasibleError when a single sample does not fit, StepError when the
        optimizer ran out after it had changed values. Any other error of the model or the loss comes out as it is, and
        so does an interrupt. A step that raises is undone: buffers, random states and gradients are those of before. If
        the optimizer had changed values already, a note on the error says so, and nothing is undone.
        """
        self._steps += 1
        self.watch.begin()
        try:
            self._mark_start()
            result = self._undone_if_it_fails(batch)
            self._start.passed()
        finally:
            self.watch.end()
        return result

    def _mark_start(self) -> None:
        """The copies that this takes may be what does not fit any more; what is cached makes room."""
        try:
            self._start.mark()
            return
        except Exception as error:
            if classify(error) not in ("memory", "maybe_memory"):
                raise
            release_frames(error)
        release_memory(self._device)
        self._start.mark()

    def _undone_if_it_fails(self, batch: Any) -> StepResult:
        self.phase = "forward"  # until then it is the phase of the step before
        autocast = self._precision.autocast_state()
        try:
            if self.candidate.parallelism.mode != "none":
                return self._train(self.split(batch))
            return self._surviving(self._sizes, batch, run=self._train, undo=self._undo)
        except (InfeasibleError, StepError):  # after a step that was undone already, or cannot be
            raise
        except BaseException as error:
            with uninterrupted():
                autocast.put_back()
                self.put_back()
                try:
                    self._undo()
                except StepError as torn:
                    error.add_note(str(torn))
                drain_backward()
            raise

    def evaluate(self, batch: Any) -> StepResult:
        """The loss of `batch` in evaluation mode, without gradients, in micro-batches; modes are put back.

        When memory runs out, smaller micro-batches are tried, apart from those of training.
        """
        self.watch.interrupted()
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                return self._surviving(self._evaluation_sizes, batch, run=self._evaluate, undo=lambda: None)
        finally:
            for module, training in modes:
                module.training = training

    def _surviving(
        self,
        sizes: MicroBatchSizes,
        batch: Any,
        *,
        run: Callable[[list[Part]], StepResult],
        undo: Callable[[], None],
    ) -> StepResult:
        """Runs the batch in micro-batches that become smaller until it passes."""
        attempts_left, ran_out = ATTEMPTS_AT_ONE, ""
        while True:
            size = sizes.of(batch)
            try:
                parts = self.split(batch, at_most=size)
                size = max(part.samples for part in parts)
                result = run(parts)
            except Exception as error:
                failure = Failure(classify(error), headline(error), error)
                if failure.kind != "memory" and (failure.kind != "maybe_memory" or size == 1):
                    if ran_out:
                        undo()
                        raise self._failed_smaller(ran_out, size, failure) from error
                    raise
                release_frames(error)
            else:
                sizes.passed(batch)
                return result
            undo()  # not inside `except`, which would keep the frames of the failed step alive
            release_memory(self._device)
            attempts_left -= size == 1 or size == max(part.samples for part in self.split(batch, at_most=1))
            if not attempts_left:
                self._give_up(failure, size)
            ran_out = failure.message if failure.kind == "memory" else ran_out
            self._note(failure, size=size, smaller=sizes.ran_out(batch, size=size))
            del failure

    def _failed_smaller(self, ran_out: str, size: int, failure: Failure) -> StepError:
        return StepError(
            f"Memory ran out in step {self._steps} ({ran_out.rstrip('.')}), and when it was run again in micro-batches "
            f"of {size} it failed otherwise: {failure.message}",
            phase=self.phase,
        )

    def _give_up(self, failure: Failure, size: int) -> NoReturn:
        samples = "one sample" if size == 1 else f"{size} samples, of which BatchNorm needs two at least"
        raise InfeasibleError(
            f"Memory ran out in {self.phase} of step {self._steps} with a micro-batch of {samples}, {ATTEMPTS_AT_ONE} "
            f"times in a row: {failure.message.rstrip('.')}. Shorten or shrink the samples, use checkpointing "
            "or a lower precision, or a larger device."
        ) from failure.error

    def _note(self, failure: Failure, *, size: int, smaller: int) -> None:
        event = OomEvent(self._steps, self.phase, size, smaller, failure.message)
        self.oom_events.append(event)
        text = "step %d ran out of memory in %s at micro-batches of %d and is run again at %d (%s)"
        logger.warning(text, event.step, event.phase, size, smaller, failure.message)

    def _undo(self) -> None:
        """Back to the start of the step. The gradients are gone already."""
        if self.phase == "optimizer":
            self._optimizer_start.undo()
        self._start.go_back()
        self._precision.renew_scaler()

    def _train(self, parts: list[Part]) -> StepResult:
        with self.activated():
            self._drop_foreign_gradients()
            try:
                self.begin(parts)
                loss = self.micro_step(parts[0], last=len(parts) == 1)
                for index, part in enumerate(parts[1:], start=2):
                    loss = loss + self.micro_step(part, last=index == len(parts))
                self._optimizer_start.mark()
                grad_norm = self.optimizer_step()
            finally:  # also the partial gradients of a step that failed
                self.zero_grad()
        return StepResult(loss, grad_norm, tuple(part.samples for part in parts))

    def _drop_foreign_gradients(self) -> None:
        """Gradients that something else left; after a step of this class there are none."""
        if any(parameter.grad is not None for group in self.optimizer.param_groups for parameter in group["params"]):
            self.zero_grad()

    def _evaluate(self, parts: list[Part]) -> StepResult:
        with self.activated():
            loss = self.loss_share(parts[0])
            for part in parts[1:]:
                loss = loss + self.loss_share(part)
        return StepResult(loss, None, tuple(part.samples for part in parts))

    def state_dict(self) -> dict[str, Any]:
        """What the step itself remembers between calls: the state of the gradient scaler under float16."""
        scaler = self.scaler
        return {} if scaler is None else {"scaler": scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])
