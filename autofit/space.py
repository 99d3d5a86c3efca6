"""From the space that the user named to the candidates of this model on this device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autofit.candidate import Candidate, Checkpointing, CheckpointingMode, Parallelism, SearchSpace
from autofit.device import DeviceInfo, check_precision, default_precisions
from autofit.errors import ConfigError
from autofit.step.blocks import Blocks


def candidates(
    space: SearchSpace,
    *,
    samples: int,
    info: DeviceInfo,
    blocks: Blocks,
    parallelisms: Sequence[Parallelism] = (Parallelism(),),
) -> list[Candidate]:
    """Every candidate of the space for `samples` per optimizer step on one rank.

    Raises ConfigError for a precision that the device cannot compute in, and for checkpointing without blocks.
    """
    for precision in space.precision or ():
        check_precision(precision, info)
    if space.offload and info.device.type == "cpu":
        raise ConfigError(
            "offload=True moves activations to the host's memory, and there the CPU's tensors lie anyway."
        )
    return [
        Candidate(
            micro_batch_size=size,
            accumulation_steps=steps,
            precision=precision,
            checkpointing=checkpointing,
            parallelism=parallelism,
        )
        for size, steps in space.splits(samples)
        for precision in space.precision or default_precisions(info)
        for checkpointing in _checkpointings(space, blocks)
        for parallelism in parallelisms
    ]


def parallelisms(space: SearchSpace, *, ranks: int, unused: Sequence[str] = ()) -> tuple[Parallelism, ...]:
    """The ways in which so many ranks may train together; `unused` are trainable parameters that get no gradient."""
    if ranks == 1:
        return (Parallelism(),)
    return tuple(
        Parallelism(mode=mode, find_unused_parameters=bool(unused), static_graph=space.static_graph)
        for mode in space.parallelism or ("ddp",)
    )


def _checkpointings(space: SearchSpace, blocks: Blocks) -> Iterator[Checkpointing]:
    """Nothing recomputed, and everything: in full, or where that may not be selectively. Masks lie between the two."""
    modes = space.checkpointing
    recomputing = [mode for mode in modes or ("full",) if mode != "none"]
    if modes is None or "none" in modes:
        yield Checkpointing()
    if "full" in recomputing and blocks.names:
        yield Checkpointing(mode="full", blocks=blocks.names)
    elif "full" not in recomputing and "selective" in recomputing and blocks.selective:
        yield Checkpointing(mode="selective", blocks=blocks.selective)
    elif modes is not None and recomputing:
        fitting = "" if "full" in recomputing else " that hold products worth keeping"
        raise ConfigError(
            f"checkpointing {recomputing[0]!r} needs blocks to recompute{fitting}, and none were found "
            f"({blocks.found_by}). Name submodules with SearchSpace(checkpoint_blocks=[…]), or leave checkpointing out."
        )
    if space.offload and blocks.names:
        yield Checkpointing(mode="offload", blocks=blocks.names)


def least_demanding(choices: Sequence[Candidate]) -> Candidate:
    """The one that should need the least memory: the smallest micro-batch, with recomputation or offloading."""
    return min(choices, key=lambda c: (c.micro_batch_size, c.checkpointing.mode == "none"))


def mask_modes(space: SearchSpace) -> tuple[CheckpointingMode, ...]:
    """The modes that each block by itself may be in; none where all blocks have to be in the same."""
    modes: tuple[CheckpointingMode, ...] = space.checkpointing or ("none", "full", "selective")
    modes += ("offload",) if space.offload else ()
    return modes if "none" in modes and len(modes) > 1 else ()


def offloading(choices: Sequence[Candidate], blocks: Blocks) -> list[Candidate]:
    """The candidates once more, with all blocks offloaded: what is left where nothing else fits."""
    checkpointing = Checkpointing(mode="offload", blocks=blocks.names)
    return list(dict.fromkeys(choice.model_copy(update={"checkpointing": checkpointing}) for choice in choices))
