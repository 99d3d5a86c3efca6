"""A step that runs out of memory is not lost: back to its start, and again in smaller micro-batches."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.batch.nest import leaves
from autofit.errors import StepError
from autofit.oom import drain_backward
from autofit.random_states import StepRandomStates
from autofit.units import KiB

# Steps without trouble after which a smaller micro-batch is doubled again, at first. Each time that this runs out of
# memory again the next attempt waits twice as long.
PATIENCE = 100
# A single sample may fail once because something else took the memory for a moment; so often in a row it does not fit.
ATTEMPTS_AT_ONE = 3
ALWAYS_COPIED_BYTES = 256 * KiB

_JOINED_DTYPES = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool})

_VERSION_OF: Callable[[torch.Tensor], int] = attrgetter("_version")


@dataclass(frozen=True)
class OomEvent:
    """One time that a step ran out of memory: in its `phase`, at micro-batches of `micro_batch_size`, then smaller."""

    step: int
    phase: str
    micro_batch_size: int
    smaller_micro_batch_size: int
    message: str


@dataclass
class _Size:
    size: int
    clean_steps: int = 0
    patience: int = field(default_factory=lambda: PATIENCE)


class MicroBatchSizes:
    """The micro-batch for each kind of batch: the plan's, smaller after memory ran out, grown back carefully."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._reduced: dict[Hashable, _Size] = {}

    def of(self, batch: Any) -> int:
        """The largest micro-batch that batches of this one's kind should be tried in."""
        reduced = self._reduced.get(kind_of(batch)) if self._reduced else None
        return reduced.size if reduced else self._largest

    def ran_out(self, batch: Any, *, size: int) -> int:
        """Memory ran out at micro-batches of `size`: half of it, 1 at least, from now on."""
        reduced = self._reduced.setdefault(kind_of(batch), _Size(size))
        reduced.size, reduced.clean_steps = -(-size // 2), 0
        return reduced.size

    def passed(self, batch: Any) -> None:
        """A step of this batch went well."""
        reduced = self._reduced.get(kind_of(batch)) if self._reduced else None
        if reduced is None or reduced.size >= self._largest:
            return
        reduced.clean_steps += 1
        if reduced.clean_steps >= reduced.patience:
            reduced.size, reduced.clean_steps = min(reduced.size * 2, self._largest), 0
            reduced.patience *= 2


class StepStart:
    """Buffers and random states at the start of a step, to run it again from there.

    Small buffers are copied at every start, for BatchNorm writes into its own without leaving a mark; large ones only
    when their version says that they have changed, so those that never change cost their bytes once.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._places = [(module._buffers, name) for module in model.modules() for name in module._buffers]
        self._owners = [owner for owner, _ in self._places]
        self._names = [name for _, name in self._places]
        self._held: list[torch.Tensor | None] | None = None
        self._saved: list[_SavedBuffer] = []
        self._large: list[_SavedBuffer] = []
        self._apart: list[_SavedBuffer] = []
        self._together: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        self._random_states = StepRandomStates(device)

    @torch.no_grad()
    def mark(self) -> None:
        """This is the start."""
        self._random_states.mark()
        now = map(dict.get, self._owners, self._names)
        if self._held is None or not all(map(is_, now, self._held)):
            self._copy_anew()
            return
        for copies, buffers in self._together:
            torch.cat(buffers, out=copies)  # one operator for all of them
        for small in self._apart:
            small.copy.copy_(small.buffer)
        for large in self._large:
            if large.version != large.buffer._version:
                large.copy.copy_(large.buffer)
                large.version = large.buffer._version

    def _copy_anew(self) -> None:
        """The first time, and when the model has put another tensor in the place of a buffer."""
        self._held = None  # until all is copied
        held = list(map(dict.get, self._owners, self._names))
        self._saved = [
            _SavedBuffer(owner, name, buffer, buffer.detach().clone(), buffer._version)
            for (owner, name), buffer in zip(self._places, held, strict=True)
            if buffer is not None and buffer.layout == torch.strided
        ]
        self._large = [saved for saved in self._saved if saved.buffer.nbytes > ALWAYS_COPIED_BYTES]
        small = [saved for saved in self._saved if saved.buffer.nbytes <= ALWAYS_COPIED_BYTES]
        self._apart = [saved for saved in small if not _lies_flat(saved.buffer)]
        groups: dict[tuple[torch.dtype, torch.device], list[_SavedBuffer]] = {}
        for saved in small:
            if _lies_flat(saved.buffer):
                groups.setdefault((saved.buffer.dtype, saved.buffer.device), []).append(saved)
        self._together = [_copied_together(group) for group in groups.values()]
        self._held = held

    @torch.no_grad()
    def go_back(self) -> None:
        """Buffers and random states are again what they were at the start."""
        for saved in self._saved:
            saved.owner[saved.name] = saved.buffer
            saved.buffer.copy_(saved.copy)
            saved.version = saved.buffer._version
        self._random_states.put_back()

    def passed(self) -> None:
        """The step that began here went well."""
        self._random_states.passed()


@dataclass
class _SavedBuffer:
    owner: dict[str, torch.Tensor | None]
    name: str
    buffer: torch.Tensor
    copy: torch.Tensor
    version: int


def _lies_flat(buffer: torch.Tensor) -> bool:
    """Whether a one-dimensional view of it shows all its elements."""
    return type(buffer) is torch.Tensor and buffer.is_contiguous() and buffer.dtype in _JOINED_DTYPES


def _copied_together(group: list[_SavedBuffer]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One tensor that holds the copies of all buffers of a group end to end, and the flat buffers to copy from."""
    flat = [saved.buffer.detach().view(-1) for saved in group]
    copies = torch.cat(flat)
    for saved, copy in zip(group, torch.split(copies, [len(buffer) for buffer in flat]), strict=True):
        saved.copy = copy.view(saved.buffer.shape)
    return copies, flat


class OptimizerStart:
    """Parameters and optimizer state before each step of the optimizer: enough to tell whether it changed anything."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._held: set[Any] = set()

    def mark(self) -> None:
        """The optimizer is about to step."""
        if len(self._optimizer.state) != len(self._held) or not self._tensors:
            self._held = set(self._optimizer.state)
            self._tensors = _tensors(self._optimizer)
        self._versions = list(map(_VERSION_OF, self._tensors))

    def undo(self) -> None:
        """Forgets state that the failed step began to make. Raises StepError when it has changed values already."""
        for parameter in [key for key in self._optimizer.state if key not in self._held]:
            del self._optimizer.state[parameter]
        now = {id(tensor) for tensor in _tensors(self._optimizer)}
        changed = sum(
            tensor._version != version or id(tensor) not in now
            for tensor, version in zip(self._tensors, self._versions, strict=True)
        )
        if changed:
            raise StepError(
                f"{type(self._optimizer).__name__}.step() was stopped after {changed} of {len(self._versions)} "
                "parameters and states had been changed, so the step can neither be undone nor repeated. Go on from "
                "the last checkpoint; if memory ran out, with a smaller micro-batch or an optimizer that needs no "
                "temporary memory (fused=True).",
                phase="optimizer",
            )


def _tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for state in optimizer.state.values():
        found += state.values() if isinstance(state, dict) else ()
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def release_memory(device: torch.device) -> None:
    """Collects garbage and gives the allocator's cached memory back to the device."""
    drain_backward()
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
        torch.accelerator.empty_cache()


def kind_of(batch: Any) -> Hashable:
    """What batches that need the same memory per sample have in common: shapes without their first dim, and dtypes."""
    return tuple((tuple(leaf.shape[1:]), leaf.dtype) for _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
