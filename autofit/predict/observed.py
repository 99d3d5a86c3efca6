"""Which blocks can be recomputed, in full or selectively, seen in one micro-step without values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from autofit.candidate import Candidate, Checkpointing
from autofit.predict.shadow import fake_batch
from autofit.predict.tracing import Subject, following
from autofit.step.accumulation import Accumulation
from autofit.step.blocks import Blocks, keep_checkpointable, observe_calls
from autofit.step.checkpointing import CheckpointPlan, Spans
from autofit.step.recompute import Forward
from autofit.step.selection import is_kept

# As in traces: batch normalisation refuses 1.
_SAMPLES = 3


def observed_blocks(subject: Subject, blocks: Blocks) -> Blocks:
    """The blocks that one micro-step shows to be fit for recomputation, which also selectively, and why others are not.

    Raises UntraceableError when the step needs values or the device.
    """
    model = subject.model
    products = _Products()
    with following(model, device=subject.device, capability=subject.capability, watch=products) as (recorder, shadow):
        if not model.training:
            model.train()
        with recorder.outside():
            batch = subject.layout.resize(fake_batch(subject.sample_batch, subject.device), _SAMPLES)
        step = Accumulation(
            model,
            shadow.optimizer(subject.optimizer, model),
            Candidate(micro_batch_size=_SAMPLES, accumulation_steps=1),
            device=subject.device,
            **subject.step_options,
        )
        (part,) = step.split(batch)
        around = CheckpointPlan(model, Checkpointing(), spans=Spans(blocks.names, products.around))
        with observe_calls(model, blocks.names) as observed, step.activated(), around.active():
            step.micro_step(part)
        step.zero_grad()
    found = keep_checkpointable(blocks, observed)
    return replace(found, selective=tuple(name for name in found.names if products.can_be_kept(name)))


class _Products:
    """What each block's matrix products, convolutions and attention give, and whether it is written to later.

    What is written over cannot be kept for a recomputation. That is told by storages: versions miss the gates of a
    recurrent layer, which are parts that do not count as views.
    """

    def __init__(self) -> None:
        self._block: str | None = None
        self._kept: dict[int, tuple[str, torch.UntypedStorage]] = {}
        self._keeping: set[str] = set()
        self._spoilt: set[str] = set()

    def around(self, block: str, forward: Forward) -> Forward:
        """`forward`, during which `block` runs."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._block = block
            try:
                return forward(*args, **kwargs)
            finally:
                self._block = None

        return run

    def __call__(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, cut: int) -> None:
        """Hears of an operator that ran."""
        if operator._schema.is_mutable:
            for argument, value in zip(operator._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._written(value)
        if self._block is not None and is_kept(operator):
            self._keeping.add(self._block)
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    self._kept[storage._cdata] = self._block, storage

    def can_be_kept(self, block: str) -> bool:
        """Whether the block has anything worth keeping, of which nothing is written over."""
        return block in self._keeping - self._spoilt

    def _written(self, value: Any) -> None:
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                block, _ = self._kept.get(tensor.untyped_storage()._cdata, (None, None))
                if block is not None:
                    self._spoilt.add(block)
