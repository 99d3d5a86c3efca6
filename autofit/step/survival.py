"""A step that runs out of memory is not lost: back to its start, and again in smaller micro-batches."""

from __future__ import annotations

import gc
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from autofit.batch.nest import leaves
from autofit.errors import StepError
from autofit.random_states import RandomStates
from autofit.units import KiB

# Steps without trouble after which a smaller micro-batch is doubled again, at first. Each time that this runs out of
# memory again the next attempt waits twice as long.
PATIENCE = 100
# A single sample may fail once because something else took the memory for a moment; so often in a row it does not fit.
ATTEMPTS_AT_ONE = 3
ALWAYS_COPIED_BYTES = 256 * KiB


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

    def of(self, kind: Hashable) -> int:
        """The largest micro-batch that batches of this kind should be tried in."""
        reduced = self._reduced.get(kind)
        return reduced.size if reduced else self._largest

    def ran_out(self, kind: Hashable, *, size: int) -> int:
        """Memory ran out at micro-batches of `size`: half of it, 1 at least, from now on."""
        reduced = self._reduced.setdefault(kind, _Size(size))
        reduced.size, reduced.clean_steps = -(-size // 2), 0
        return reduced.size

    def passed(self, kind: Hashable) -> None:
        """A step of this kind went well."""
        reduced = self._reduced.get(kind)
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
        self._device = device
        self._places = [(module, name) for module in model.modules() for name in module._buffers]
        self._saved: dict[int, _SavedBuffer] = {}
        self._random_states: RandomStates | None = None

    @torch.no_grad()
    def mark(self) -> None:
        """This is the start."""
        self._random_states = RandomStates(self._device)
        stale: dict[tuple[torch.dtype, torch.device], list[_SavedBuffer]] = {}
        for place, (module, name) in enumerate(self._places):
            buffer = module._buffers.get(name)
            saved = self._saved.get(place)
            if buffer is None or buffer.layout != torch.strided:
                self._saved.pop(place, None)
            elif saved is None or saved.buffer is not buffer:
                self._saved[place] = _SavedBuffer(buffer, buffer.detach().clone(), buffer._version)
            elif buffer.nbytes <= ALWAYS_COPIED_BYTES or saved.version != buffer._version:
                stale.setdefault((buffer.dtype, buffer.device), []).append(saved)
                saved.version = buffer._version
        for group in stale.values():
            torch._foreach_copy_([saved.copy for saved in group], [saved.buffer for saved in group])

    @torch.no_grad()
    def go_back(self) -> None:
        """Buffers and random states are again what they were at the start."""
        for place, saved in self._saved.items():
            module, name = self._places[place]
            module._buffers[name] = saved.buffer
            if saved.buffer.nbytes <= ALWAYS_COPIED_BYTES or saved.buffer._version != saved.version:
                saved.buffer.copy_(saved.copy)
                saved.version = saved.buffer._version
        if self._random_states is not None:
            self._random_states.put_back()


@dataclass
class _SavedBuffer:
    buffer: torch.Tensor
    copy: torch.Tensor
    version: int


class OptimizerStart:
    """Parameters and optimizer state before the optimizer steps: enough to tell whether it changed anything."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._versions = [(tensor, tensor._version) for tensor in _tensors(optimizer)]
        self._held = set(optimizer.state)

    def undo(self) -> None:
        """Forgets state that the failed step began to make. Raises StepError when it has changed values already."""
        changed = sum(tensor._version != version for tensor, version in self._versions)
        if changed:
            raise StepError(
                f"Memory ran out in the middle of {type(self._optimizer).__name__}.step(), after {changed} of "
                f"{len(self._versions)} parameters and states had been changed, so the step can neither be undone nor "
                "repeated. Go on from the last checkpoint, with a smaller micro-batch or an optimizer that needs no "
                "temporary memory (fused=True).",
                phase="optimizer",
            )
        for parameter in [key for key in self._optimizer.state if key not in self._held]:
            del self._optimizer.state[parameter]


def _tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [leaf for state in optimizer.state.values() for leaf in tree_leaves(state)]
    return [tensor for tensor in (*parameters, *states) if isinstance(tensor, torch.Tensor)]


def release_memory(device: torch.device) -> None:
    """Collects garbage and gives the allocator's cached memory back to the device."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
        torch.accelerator.empty_cache()


def kind_of(batch: Any) -> Hashable:
    """What batches that need the same memory per sample have in common: shapes without their first dim, and dtypes."""
    return tuple((tuple(leaf.shape[1:]), leaf.dtype) for _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
