"""One training step over several ranks: whose gradients are added up, when, and what each rank's loss weighs.

`Parallel` itself is one process: its hooks do nothing, so that each kind overrides only what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autofit.candidate import Candidate, Parallelism
from autofit.distributed.group import new_group
from autofit.errors import ConfigError


class Parallel:
    """How the ranks work together on one step; here there is only one.

    `factor` is what a rank's losses are multiplied by, so that the mean of the ranks' gradients is that of the batch.
    """

    factor = 1.0

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def module(self) -> nn.Module:
        """What forward calls."""
        return self._model

    def micro_step(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch; gradients are exchanged in the `last` of a step."""
        return nullcontext()

    def begin(self, weights: Sequence[float], *, summed: bool) -> None:
        """A step begins whose micro-batches weigh so much on this rank, or whose losses are `summed`."""

    def end(self) -> None:
        """The step is over, before its gradients are dropped."""


class DataParallel(Parallel):
    """DistributedDataParallel around the model, on `group` (None: the default process group).

    The model is wrapped when the first micro-batch runs. Where gradients accumulate (`accumulates`), they do so in the
    buckets that are exchanged, so that they need no memory of their own; not in the first step, which makes these.
    """

    def __init__(
        self, model: nn.Module, parallelism: Parallelism, group: dist.ProcessGroup | None, *, accumulates: bool
    ) -> None:
        super().__init__(model)
        check_group(parallelism)
        self._parallelism = parallelism
        self._group = group
        self._host_group: dist.ProcessGroup | None = None
        self._wrapped: _Wrapper | None = None
        self._buckets: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._accumulates = accumulates

    def module(self) -> nn.Module:
        if self._wrapped is None:
            # A static graph cannot begin with a micro-batch that exchanges nothing: torch fails in an assertion.
            static = self._parallelism.static_graph and not self._accumulates
            self._wrapped = _Wrapper(
                self._model,
                process_group=self._group,
                gradient_as_bucket_view=True,
                find_unused_parameters=self._parallelism.find_unused_parameters and not static,
                static_graph=static,
            )
        return self._wrapped

    def micro_step(self, *, last: bool) -> AbstractContextManager[None]:
        if last:
            return nullcontext()
        for parameter, gradient in self._buckets:
            parameter.grad = gradient.zero_()
        self._buckets = []
        return self.module().no_sync()  # type: ignore[no-any-return, operator]

    def begin(self, weights: Sequence[float], *, summed: bool) -> None:
        """All ranks are asked what theirs weigh; raises ConfigError on all where one rank's weigh nothing."""
        ranks = dist.get_world_size(self._group)
        if summed:
            self.factor = float(ranks)
            return
        own = sum(weights)
        entries = torch.tensor([own, float(own == 0)], dtype=torch.float64)
        dist.all_reduce(entries, group=self._hosts())
        total, empty = entries.tolist()
        if empty:
            raise ConfigError(
                f"On {empty:.0f} of {ranks} ranks every sample of this batch has weight 0, so their loss is undefined. "
                "Leave batches out in which every target is ignored."
            )
        self.factor = ranks * own / total

    def _hosts(self) -> dist.ProcessGroup:
        """A group of the same ranks that does not wait for the device."""
        if self._host_group is None:
            group = self._group or dist.group.WORLD
            assert group is not None
            is_for_hosts = "gloo" in dist.get_backend(group)
            ranks = dist.get_process_group_ranks(group)
            self._host_group = group if is_for_hosts else new_group(ranks=ranks, backend="gloo")
        return self._host_group

    def end(self) -> None:
        if self._accumulates and self._wrapped is not None:
            found = [(p, p.grad) for p in self._model.parameters() if p.requires_grad and p.grad is not None]
            self._buckets = found or self._buckets


class _Wrapper(DistributedDataParallel):
    """Also has what the model has, for losses that ask the model for its methods and attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)


def parallel(model: nn.Module, candidate: Candidate, *, group: dist.ProcessGroup | None) -> Parallel:
    """The way of working together that a candidate names; raises ConfigError where there is no process group for it."""
    if candidate.parallelism.mode == "none":
        return Parallel(model)
    return DataParallel(model, candidate.parallelism, group, accumulates=candidate.accumulation_steps > 1)


def check_group(parallelism: Parallelism) -> None:
    """Raises ConfigError where no process group is initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            f"A step with parallelism {parallelism.mode!r} needs a process group: start the script with torchrun and "
            "call torch.distributed.init_process_group() before it."
        )
