"""What can be tried: one candidate, and the space of them."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic import ValidationError as PydanticValidationError

from autofit.errors import ConfigError

Precision = Literal["float32", "tf32", "bfloat16", "float16"]
CheckpointingMode = Literal["none", "full", "selective", "offload"]
RecomputingMode = Literal["none", "full", "selective"]
ParallelMode = Literal["none", "ddp"]

# How far each precision lies from float32; breaks ties, the exact one first.
NUMERIC_CHANGE: dict[Precision, int] = {"float32": 0, "tf32": 1, "bfloat16": 2, "float16": 3}

# Beyond these nobody means it: what follows from them would take the memory and the time of the search.
MOST_VALUES = 2**16
MOST_SAMPLES = 2**24

ModelT = TypeVar("ModelT", bound="FrozenModel")


class FrozenModel(BaseModel):
    """Data that does not change: frozen, unknown fields refused, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def _printable(text: str) -> str:
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


# Text for people. What would move the cursor, recolour or retitle a terminal, or turn the writing direction, is shown
# as an escape sequence: plans come from strangers, and messages from libraries.
Printable = Annotated[str, AfterValidator(_printable)]


class Checkpointing(FrozenModel):
    """Activation checkpointing: which blocks keep no activations for backward on the device, and what they do instead.

    `mode` holds for `blocks`, names of submodules. `full` runs a block's whole forward again in backward; `selective`
    keeps what its matrix products, convolutions and attention gave and runs the rest again; `offload` recomputes
    nothing, activations wait in host memory. No `blocks` means: all that autofit finds in the model. Blocks in other
    modes stand beside named ones of mode `full` (`selective_blocks`) or of mode `full` or `selective`
    (`offload_blocks`).
    """

    mode: CheckpointingMode = "none"
    blocks: tuple[str, ...] = ()
    selective_blocks: tuple[str, ...] = ()
    offload_blocks: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _each_block_in_one_mode(self) -> Checkpointing:
        if self.mode == "none" and self.blocks:
            raise ValueError(f"checkpointing mode 'none' takes no blocks, got {list(self.blocks)}")
        allowed = (
            {"full": ("selective", "offload"), "selective": ("offload",)}.get(self.mode, ()) if self.blocks else ()
        )
        for mode, names in (("selective", self.selective_blocks), ("offload", self.offload_blocks)):
            if names and mode not in allowed:
                raise ValueError(
                    f"{mode}_blocks={list(names)} stand beside named blocks of a mode that saves more; without those, "
                    f"use mode={mode!r} and blocks"
                )
        counts = Counter((*self.blocks, *self.selective_blocks, *self.offload_blocks))
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise ValueError(f"the blocks {twice} are named more than once; a block has one mode")
        return self

    @classmethod
    def of(cls, modes: Mapping[str, CheckpointingMode]) -> Checkpointing:
        """The checkpointing with every block in its mode; blocks of mode `none` may stand in `modes`."""
        named: dict[CheckpointingMode, tuple[str, ...]] = {}
        for mode in get_args(CheckpointingMode)[1:]:
            if names := tuple(name for name, its_mode in modes.items() if its_mode == mode):
                named[mode] = names
        if not named:
            return cls()
        mode = next(iter(named))
        others = {f"{other}_blocks": names for other, names in named.items() if other != mode}
        return cls(mode=mode, blocks=named[mode], **others)

    @property
    def modes(self) -> dict[str, CheckpointingMode]:
        """The mode of each named block."""
        modes: dict[str, CheckpointingMode] = dict.fromkeys(self.blocks, self.mode)
        modes |= dict.fromkeys(self.selective_blocks, "selective")
        modes |= dict.fromkeys(self.offload_blocks, "offload")
        return modes

    def __str__(self) -> str:
        parts = [f"{self.mode}({len(self.blocks)})" if self.blocks else self.mode]
        parts += [f"selective({len(self.selective_blocks)})"] if self.selective_blocks else []
        parts += [f"offload({len(self.offload_blocks)})"] if self.offload_blocks else []
        return "+".join(parts)


class Parallelism(FrozenModel):
    """How the ranks of a process group train one model together.

    `ddp`: every rank has all of it, and gradients are exchanged (`DistributedDataParallel`). There,
    `find_unused_parameters` is for models of which some parameters get no gradient, and `static_graph` says that every
    step uses the same ones, of which torch makes use where nothing is accumulated.
    """

    mode: ParallelMode = "none"
    find_unused_parameters: bool = False
    static_graph: bool = False

    def __str__(self) -> str:
        return self.mode


class Candidate(FrozenModel):
    """One point of the search space: how to run one optimizer step.

    `micro_batch_size` is the largest micro-batch: the samples are split into `accumulation_steps` parts as evenly as
    possible, larger ones first.
    """

    micro_batch_size: int = Field(ge=1)
    accumulation_steps: int = Field(ge=1)
    precision: Precision = "float32"
    checkpointing: Checkpointing = Checkpointing()
    parallelism: Parallelism = Parallelism()

    def split(self, samples: int) -> tuple[int, ...]:
        """Sizes of the micro-batches of a batch of `samples`: they add up to it exactly and differ by one at most.

        The batch that the candidate was made for takes `accumulation_steps` parts. Another one, such as the last of an
        epoch, takes as few as keep every part within `micro_batch_size`.
        """
        parts = self.accumulation_steps
        if parts > samples or -(-samples // parts) != self.micro_batch_size:
            parts = -(-samples // self.micro_batch_size)
        return balanced(samples, parts)

    def __str__(self) -> str:
        together = "" if self.parallelism.mode == "none" else f" {self.parallelism}"
        return (
            f"{self.micro_batch_size} × {self.accumulation_steps} {self.precision} checkpointing {self.checkpointing}"
            f"{together}"
        )


def balanced(samples: int, parts: int) -> tuple[int, ...]:
    """`samples` split into `parts` sizes that differ by one at most, larger ones first: (10, 4) is (3, 3, 2, 2)."""
    if not 1 <= parts <= samples:
        raise ConfigError(f"{samples} samples cannot be split into {parts} parts of at least one.")
    small, larger = divmod(samples, parts)
    return (small + 1,) * larger + (small,) * (parts - larger)


def _as_sizes(value: Any) -> Any:
    """One number, a range or any collection of numbers, as a sorted tuple of distinct ones."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return (value,)
    if not isinstance(value, Iterable):
        return value
    values = _at_most(value, MOST_VALUES)
    # What cannot be sorted or hashed is no number; validation says so.
    return tuple(sorted(set(values))) if all(isinstance(item, (int, float)) for item in values) else values


def _as_choices(value: Any) -> Any:
    """One choice or several, in the order given, each once."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Iterable):
        return value
    values = _at_most(value, MOST_VALUES)
    return tuple(dict.fromkeys(values)) if all(isinstance(item, str) for item in values) else values


def _at_most(values: Iterable[Any], count: int) -> tuple[Any, ...]:
    """The values; an endless or enormous collection is refused before it takes the memory."""
    taken = tuple(islice(values, count + 1))
    if len(taken) > count:
        raise ValueError(f"more than {count} values; leave it out to allow any, or pass fewer")
    return taken


Sizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...] | None, BeforeValidator(_as_sizes)]


class SearchSpace(FrozenModel):
    """The candidates that may be tried. What is left out takes the device's default.

    `micro_batch_size`: a number, a range or a collection; each is an upper bound, made even by the balanced split
    (48 for 512 samples becomes 47). `accumulation_steps`: likewise, exact. `precision`: `float32`, `tf32`,
    `bfloat16`, `float16`. `checkpointing`: modes that a block may be in, `none`, `full` and `selective`; without
    `none`, every block is recomputed. `checkpoint_blocks`: names or `fnmatch` patterns of the submodules to
    recompute instead of those that autofit finds. `parallelism`: `ddp`, and only in a process group of several
    ranks; `static_graph`: every step of the model uses the same parameters in the same order, which spares DDP some
    work. `even_split`: only micro-batches of one size, for frameworks that know no other.

    Raises ConfigError when a value is not allowed.
    """

    micro_batch_size: Sizes = None
    accumulation_steps: Sizes = None
    precision: Annotated[tuple[Precision, ...] | None, BeforeValidator(_as_choices)] = None
    checkpointing: Annotated[tuple[RecomputingMode, ...] | None, BeforeValidator(_as_choices)] = None
    checkpoint_blocks: Annotated[tuple[str, ...] | None, BeforeValidator(_as_choices)] = None
    offload: bool | None = None
    parallelism: Annotated[tuple[ParallelMode, ...] | None, BeforeValidator(_as_choices)] = None
    static_graph: bool = False
    even_split: bool = False

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except PydanticValidationError as error:
            raise ConfigError(describe_validation(error, "SearchSpace")) from None
        for name in type(self).model_fields:
            if getattr(self, name) == ():
                raise ConfigError(f"SearchSpace({name}=…) is empty: pass at least one value or leave it out.")

    def splits(self, samples: int) -> tuple[tuple[int, int], ...]:
        """The (micro_batch_size, accumulation_steps) pairs for `samples` per optimizer step, smallest first.

        Every micro-batch that a balanced split can have occurs once, so 512 samples have 45, not 512.
        Raises ConfigError when none is allowed.
        """
        if samples > MOST_SAMPLES:
            raise ConfigError(f"{samples} samples per optimizer step are not allowed: pass at most {MOST_SAMPLES}.")
        found = set(self._allowed_splits(samples))
        if not found:
            raise ConfigError(
                f"No split of {samples} samples is in the space: micro_batch_size={self.micro_batch_size}, "
                f"accumulation_steps={self.accumulation_steps}, even_split={self.even_split}. "
                f"A micro-batch of m takes ceil({samples} / m) accumulation steps."
            )
        return tuple(sorted(found))

    def _allowed_splits(self, samples: int) -> Iterator[tuple[int, int]]:
        allowed_steps = set(self.accumulation_steps or ())
        steps = allowed_steps or self._all_steps(samples)
        largest = max(self.micro_batch_size or (samples,))
        smallest = min(self.micro_batch_size or (1,))
        for count in steps:
            if count > samples or (self.even_split and samples % count):
                continue
            size = -(-samples // count)
            if not allowed_steps or smallest <= size <= largest:
                yield size, count

    def _all_steps(self, samples: int) -> set[int]:
        """For each size that is allowed, the fewest accumulation steps of micro-batches of at most that."""
        if self.micro_batch_size is None:
            return set(_divisors(samples)) if self.even_split else set(_distinct_steps(samples))
        fewest = {-(-samples // size) for size in self.micro_batch_size}
        if not self.even_split:
            return fewest
        divisors = _divisors(samples)
        return {divisors[bisect_left(divisors, steps)] for steps in fewest}


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _distinct_steps(samples: int) -> Iterator[int]:
    """ceil(samples / size) for every size, each value once, in some 2 √samples turns."""
    size = 1
    while size < samples:
        steps = -(-samples // size)
        yield steps
        size = (samples - 1) // (steps - 1) + 1
    yield 1


def describe_validation(error: PydanticValidationError, subject: str) -> str:
    """A pydantic error as one sentence that says where, what was passed and what is allowed."""
    parts = []
    for detail in error.errors(include_url=False):
        where = ".".join(str(step) for step in detail["loc"])
        parts.append(f"{where or subject}: {detail['msg']} (got {str(detail.get('input'))[:80]!r})")
    known_models: dict[str, type[FrozenModel]] = {"SearchSpace": SearchSpace, "Candidate": Candidate}
    fields = known_models.get(subject)
    known = (
        f" Fields: {', '.join(fields.model_fields)}; precisions: {', '.join(get_args(Precision))}." if fields else ""
    )
    return f"{subject} is not valid: {'; '.join(parts)}.{known}"
