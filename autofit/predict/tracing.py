"""A training step on tensors without values: the very one that trains, followed storage by storage."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from autofit.batch import BatchLayout
from autofit.batch.nest import leaves
from autofit.candidate import Candidate
from autofit.errors import ConfigError
from autofit.gpus import Capability
from autofit.loss.forms import Loss
from autofit.predict.failures import UntraceableError
from autofit.predict.recorder import Recorder, Trace, Watch
from autofit.predict.scratch import CudaScratch, Learned, LearnedScratch
from autofit.predict.shadow import OptimizerLike, Shadow, fake_batch, untouched
from autofit.predict.target import FakeMode, dispatching_as
from autofit.predict.walk import PythonEngine, SavedTensors
from autofit.step.accumulation import Accumulation, LossOptions, Part
from autofit.step.checkpointing import CheckpointPlan, Spans

# New objects until the garbage collector looks while a step is traced; a trace of ResNet-50 makes about so many.
COLLECTED_OBJECTS = 200_000


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is trained, and on which device. `capability` is the compute capability of a CUDA device."""

    model: nn.Module
    sample_batch: Any
    layout: BatchLayout
    optimizer: OptimizerLike
    device: torch.device
    capability: Capability
    step_options: LossOptions = field(default_factory=LossOptions)
    max_grad_norm: float | None = None


@contextmanager
def following(
    model: nn.Module,
    *,
    device: torch.device,
    capability: Capability,
    watch: Watch | None = None,
    holds: bool = False,
    learned: Learned | None = None,
) -> Iterator[tuple[Recorder, Shadow]]:
    """Inside, `model` has no values and everything that runs is recorded; afterwards it is what it was.

    With `holds` the trace tells apart what else holds a storage and that backward needs it (`Trace.ends`). `learned` is
    what operators were seen to take inside when they ran on the device. Raises UntraceableError, from the original
    error, when something inside needs values or a device.
    """
    cuda = device.type == "cuda"
    known = CudaScratch(capability) if cuda else None
    scratch = known if learned is None else LearnedScratch(learned, known)
    recorder = Recorder(device, scratch=scratch, watch=watch)
    saved = SavedTensors(recorder.saved, stand_in=recorder.stand_in) if holds else SavedTensors(recorder.saved)
    engine = PythonEngine(saved, on_node=recorder.enter_node, in_place=cuda)
    shadow = Shadow(device)
    with ExitStack() as stack:
        stack.enter_context(_collecting_rarely())
        stack.enter_context(untouched(model))
        stack.enter_context(warnings.catch_warnings(action="ignore"))  # what runs for real says it again
        stack.enter_context(_explaining(recorder))
        stack.enter_context(FakeMode())
        stack.enter_context(dispatching_as(device, capability))
        shadow.take_over(model)
        stack.enter_context(recorder.closing())
        stack.enter_context(engine.active())
        stack.enter_context(recorder.naming(model))
        stack.enter_context(torch.enable_grad())
        yield recorder, shadow


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    """A trace makes many small objects that stay; looking through all of them again and again finds nothing."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], COLLECTED_OBJECTS) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def _explaining(recorder: Recorder) -> Iterator[None]:
    try:
        yield
    except (UntraceableError, ConfigError):
        raise
    except Exception as error:
        operator, module = recorder.operator, recorder.entered
        reason = next(iter(str(error).splitlines()), "")
        raise UntraceableError(
            f"The step cannot be traced without values: in or after {operator or 'its start'}"
            f"{f' in {module!r}' if module else ''} came {type(error).__name__}: {reason}",
            operator=operator,
            module=module,
        ) from error


def trace_step(
    subject: Subject,
    candidate: Candidate,
    *,
    watch: Watch | None = None,
    blocks: tuple[str, ...] = (),
    learned: Learned | None = None,
) -> Trace:
    """Two optimizer steps of `candidate`: one of one micro-batch, which makes the optimizer's state, and a full one.

    Of the full one's micro-batches at most two run, since a third needs what the second needed. Marks: `micro 0` and
    so on, by the position in the batch, and `optimizer`. `blocks` are followed: the trace says when each runs.
    """
    model = subject.model
    with following(
        model, device=subject.device, capability=subject.capability, watch=watch, holds=bool(blocks), learned=learned
    ) as (
        recorder,
        shadow,
    ):
        if not model.training:
            model.train()
        parts = min(candidate.accumulation_steps, 2)
        samples = candidate.micro_batch_size * parts
        with recorder.outside():
            batch = subject.layout.resize(fake_batch(subject.sample_batch, subject.device), samples)
        _adopt_model(recorder, model)
        step = _FollowedStep(
            model,
            shadow.optimizer(subject.optimizer, model),
            candidate.model_copy(update={"accumulation_steps": parts}),
            max_grad_norm=subject.max_grad_norm,
            device=subject.device,
            **subject.step_options,
        )
        step.follow(recorder, blocks)
        pieces = step.split(batch)
        with step.activated():
            for some in (pieces[:1], pieces):
                _optimizer_step(step, some, recorder)
        return recorder.trace


def _adopt_model(recorder: Recorder, model: nn.Module) -> None:
    for parameter in model.parameters():
        recorder.adopt(parameter, "weights")
    for buffer in model.buffers():
        recorder.adopt(buffer, "buffers")


def _optimizer_step(step: _FollowedStep, pieces: list[Part], recorder: Recorder) -> None:
    step.zero_grad()
    losses = []
    for index, piece in enumerate(pieces):
        recorder.mark(f"micro {index}")
        losses.append(step.micro_step(piece))
    recorder.mark("optimizer")
    step.optimizer_step()
    step.zero_grad()


class _FollowedStep(Accumulation):
    """The training step itself; it only tells the recorder what is what."""

    def follow(self, recorder: Recorder, blocks: tuple[str, ...]) -> None:
        self._recorder = recorder
        if blocks:
            spans = Spans(blocks, recorder.around)
            self._checkpoints = CheckpointPlan(self.model, self.candidate.checkpointing, spans=spans)
        self._tell_states()
        recorder.phase = lambda: self.phase
        loss = self._loss

        def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
            for _, leaf in leaves(batch):
                recorder.adopt(leaf, "inputs")
            return loss(model, batch)

        self._loss = cast(Loss, loss_of)

    def micro_step(self, part: Part, *, last: bool = True) -> torch.Tensor:
        loss = super().micro_step(part, last=last)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self._recorder.adopt(parameter.grad, "gradients")
        return loss

    def optimizer_step(self) -> torch.Tensor | None:
        norm = super().optimizer_step()
        self._tell_states()
        return norm

    def _tell_states(self) -> None:
        for value in tree_leaves(list(self.optimizer.state.values())):
            if isinstance(value, torch.Tensor):
                self._recorder.adopt(value, "optimizer_states")
