"""From the space that the user named to the candidates of this model on this device."""

from __future__ import annotations

from collections.abc import Iterator

from autofit.candidate import Candidate, Checkpointing, CheckpointingMode, SearchSpace
from autofit.device import DeviceInfo, check_precision, default_precisions
from autofit.errors import ConfigError
from autofit.step.blocks import Blocks


def candidates(space: SearchSpace, *, samples: int, info: DeviceInfo, blocks: Blocks) -> list[Candidate]:
    """Every candidate of the space for `samples` per optimizer step on one rank.

    Raises ConfigError for a precision that the device cannot compute in, and for checkpointing without blocks.
    """
    for precision in space.precision or ():
        check_precision(precision, info)
    return [
        Candidate(micro_batch_size=size, accumulation_steps=steps, precision=precision, checkpointing=checkpointing)
        for size, steps in space.splits(samples)
        for precision in space.precision or default_precisions(info)
        for checkpointing in _checkpointings(space.checkpointing, blocks)
    ]


def _checkpointings(modes: tuple[CheckpointingMode, ...] | None, blocks: Blocks) -> Iterator[Checkpointing]:
    if modes is not None and "full" in modes and not blocks.names:
        raise ConfigError(
            f"checkpointing 'full' needs blocks to recompute, and none were found ({blocks.found_by}). "
            "Name submodules with SearchSpace(checkpoint_blocks=[…]), or leave checkpointing out."
        )
    for mode in modes or ("none", "full"):
        if mode == "none":
            yield Checkpointing()
        elif blocks.names:
            yield Checkpointing(mode=mode, blocks=blocks.names)
