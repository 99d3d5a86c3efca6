"""What recomputing one block alone saves and costs, in the whole step and not by the block's own bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autofit.candidate import Candidate
from autofit.insight import BlockEffect
from autofit.predict.line import SizedTrace
from autofit.predict.masks import Masks
from autofit.predict.solver import Floats
from autofit.predict.work import Tally


def block_effects(
    masks: Masks, candidate: Candidate, sizes: Sequence[int], clock: Callable[[Tally], Floats]
) -> tuple[BlockEffect, ...]:
    """Every block of `masks` in a step of micro-batches of `sizes`; `clock` gives the seconds of each operator."""
    mean = sum(sizes) / len(sizes)
    own, everywhere = candidate.checkpointing.modes, candidate.checkpointing.mode
    default = everywhere if not own else "none"
    plain = _peak(masks.at({}, sizes))
    whole = masks.plain_seconds(mean, clock)
    seconds = masks.seconds(mean, clock)[:, masks.modes.index("full")]
    return tuple(
        BlockEffect(
            name=name,
            mode=own.get(name, default),
            saves_bytes=plain - _peak(masks.at({name: "full"}, sizes)),
            costs_share=float(cost) / whole if whole else 0.0,
        )
        for name, cost in zip(masks.blocks, seconds, strict=True)
    )


def _peak(sized: SizedTrace) -> int:
    return max(sized.in_use(), default=0)
