"""Every mask of checkpointing modes over blocks, predicted from one trace per mode: bytes, seconds, the best mask."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from autofit.candidate import CheckpointingMode
from autofit.memory import replay
from autofit.memory.config import MIN_BLOCK
from autofit.predict.line import SIZES, SizedTrace, born_in_second
from autofit.predict.prediction import allocator_events
from autofit.predict.recorder import Trace
from autofit.predict.solver import Choice, Floats, Problem, solve
from autofit.predict.splice import without_second
from autofit.predict.traces import Traced
from autofit.predict.weave import Weave, WeaveError
from autofit.predict.work import Tally, marked, tally_at

Mask = Mapping[str, CheckpointingMode]
Pair = tuple[Traced, Traced]  # of the two SIZES

# What an operator takes at least under selective recomputation: each goes through Python, in forward and again in
# backward. Measured: torch 2.14, one core of a server, from 15 to 25 µs.
SELECTING_SECONDS = 20e-6
# The solver's replays: about a second of them, but a few for the largest models too.
REPLAYED_EVENTS, LEAST_REPLAYS = 150_000, 4


class Masks:
    """Masks over `blocks` in one precision; `traced` has the step with all blocks in one mode, for each mode.

    `selective` are the blocks that may be in mode `selective`. Raises WeaveError where traces cannot be put together.
    """

    def __init__(
        self, traced: Mapping[CheckpointingMode, Pair], *, blocks: Sequence[str], selective: Collection[str]
    ) -> None:
        self.blocks = tuple(blocks)
        self.modes: tuple[CheckpointingMode, ...] = ("none", *(mode for mode in traced if mode != "none"))
        self._traced = traced
        self._selective = frozenset(selective)
        for mode, (low, high) in traced.items():
            if low.trace.uneven or not _alike(low.trace, high.trace):
                raise WeaveError(f"with checkpointing {mode!r} memory does not grow evenly with the micro-batch")
        self._weave = Weave({mode: low.trace for mode, (low, _) in traced.items()})
        few, many = (self._column(lambda traced, index: traced.trace.sizes[index], of=of) for of in (0, 1))
        slope, rest = np.divmod(many - few, SIZES[1] - SIZES[0])
        # What a kernel takes for itself need not grow evenly, and is not less where more samples run.
        scratch = np.array([traced[mode][0].trace.categories[i] == "scratch" for mode, i in self._weave.origin])
        if rest[~scratch].any():
            raise WeaveError("sizes are not proportional to samples")
        self._slope = np.where(scratch, np.maximum(slope, 0), slope)
        self._base = few - self._slope * SIZES[0]
        second = {mode: born_in_second(low.trace) for mode, (low, _) in traced.items()}
        self._of_second = np.array([second[mode][index] for mode, index in self._weave.origin])

    def at(self, mask: Mask, sizes: Sequence[int]) -> SizedTrace:
        """The trace of a step of micro-batches of `sizes` under `mask`."""
        trace = self._weave.trace(mask)
        trace.settle()
        return SizedTrace(_for_sizes(trace, sizes), self._bytes(sizes).tolist())

    def seconds(self, samples: float, clock: Callable[[Tally], Floats]) -> Floats:
        """What each block, by row, costs beyond mode `none` in each mode, by column, in a micro-step of `samples`.

        Infinite where a block cannot be in a mode. `clock` gives the seconds of each operator.
        """
        *_, start, stop = marked(self._traced["none"][0].trace)
        seconds = np.zeros((len(self.blocks), len(self.modes)))
        for at in range(start, stop):
            span = self._weave.spans[at]
            if span is None or span[0] not in self.blocks:
                continue
            block = self.blocks.index(span[0])
            for column, mode in enumerate(self.modes):
                few, many = (traced.log.segment(at) for traced in self._traced[mode])
                times = clock(tally_at(samples, (SIZES[0], few), (SIZES[1], many)))
                seconds[block, column] += times.sum()
                if mode == "selective" and span[1] == "forward":
                    seconds[block, column] += 2 * np.maximum(SELECTING_SECONDS - times, 0).sum()
        seconds = np.maximum(seconds - seconds[:, :1], 0)
        if "selective" in self.modes:
            barred = [block not in self._selective for block in self.blocks]
            seconds[barred, self.modes.index("selective")] = np.inf
        return seconds

    def plain_seconds(self, samples: float, clock: Callable[[Tally], Floats]) -> float:
        """Seconds of a micro-step of `samples` that recomputes nothing."""
        few, many = self._traced["none"]
        *_, start, stop = marked(few.trace)
        sized = [((SIZES[0], few.log.segment(at)), (SIZES[1], many.log.segment(at))) for at in range(start, stop)]
        return float(sum(clock(tally_at(samples, low, high)).sum() for low, high in sized))

    def cost(self, mask: Mask, samples: float, clock: Callable[[Tally], Floats]) -> float:
        """Seconds that a micro-step of `samples` takes longer under `mask` than without recomputation."""
        seconds = self.seconds(samples, clock)
        return float(sum(seconds[self.blocks.index(block), self.modes.index(mode)] for block, mode in mask.items()))

    def solve(
        self,
        sizes: Sequence[int],
        cap_bytes: int,
        clock: Callable[[Tally], Floats],
        *,
        modes: Collection[CheckpointingMode],
    ) -> dict[str, CheckpointingMode] | None:
        """The mask that costs the fewest seconds of those that fit under `cap_bytes`; None when none was found.

        Blocks are in `modes` or in `none`.
        """
        nbytes = self._bytes(sizes)
        profiles = Profiles(self._weave, nbytes, self.blocks, self.modes, single=len(sizes) == 1)
        listed = nbytes.tolist()

        @cache
        def fits(choice: Choice) -> bool:
            trace = self._weave.trace(self.mask(choice))  # unsettled: to the allocator the order of deaths is the same
            return replay(allocator_events(SizedTrace(_for_sizes(trace, sizes), listed)), cap_bytes).fits

        seconds = self.seconds(sum(sizes) / len(sizes), clock)
        for column, mode in enumerate(self.modes):
            if mode != "none" and mode not in modes:
                seconds[:, column] = np.inf
        replays = max(LEAST_REPLAYS, REPLAYED_EVENTS // len(profiles))
        found = solve(Problem(seconds, cache(profiles.of), fits, cap_bytes, replays))
        return None if found is None else self.mask(found)

    def mask(self, choice: Choice) -> dict[str, CheckpointingMode]:
        """The mode of each block."""
        return {block: self.modes[mode] for block, mode in zip(self.blocks, choice, strict=True)}

    def _bytes(self, sizes: Sequence[int]) -> NDArray[np.int64]:
        of_second = self._of_second * (sizes[min(1, len(sizes) - 1)] - sizes[0])
        nbytes: NDArray[np.int64] = self._base + self._slope * (sizes[0] + of_second)
        return nbytes

    def _column(self, value: Callable[[Traced, int], int], *, of: int) -> NDArray[np.int64]:
        return np.array([value(self._traced[mode][of], index) for mode, index in self._weave.origin], dtype=np.int64)


class Profiles:
    """The bytes in use at most in each segment of a step, for any choice of modes."""

    def __init__(
        self,
        weave: Weave,
        nbytes: NDArray[np.int64],
        blocks: Sequence[str],
        modes: Sequence[CheckpointingMode],
        *,
        single: bool,
    ) -> None:
        numbers = {block: number for number, block in enumerate(blocks)}
        self._rounded = -(-nbytes // MIN_BLOCK) * MIN_BLOCK
        self._numbers = [numbers.get(span[0]) if span is not None else None for span in weave.spans]
        skipped = weave.second_micro_step if single else range(0)
        gone = {i for at in skipped for mode in modes for i in weave.items(at, mode) if i >= 0}
        self._items = [
            [
                np.array([i for i in weave.items(at, mode) if (i if i >= 0 else ~i) not in gone], dtype=np.int64)
                for mode in (modes if number is not None else modes[:1])
            ]
            for at, number in enumerate(self._numbers)
        ]

    def __len__(self) -> int:
        """How many births and ends a step has that recomputes nothing."""
        return sum(len(items[0]) for items in self._items)

    def of(self, choice: Choice) -> Floats:
        """One figure per segment, in bytes of blocks."""
        parts = [
            items[0 if number is None else choice[number]]
            for items, number in zip(self._items, self._numbers, strict=True)
        ]
        items = np.concatenate(parts)
        starts = np.cumsum([0, *map(len, parts[:-1])])
        ends = np.flatnonzero(items < 0)
        ended = ~items[ends]
        last = np.full(len(self._rounded), -1)
        last[ended] = ends  # of several the last stays
        deaths = last[ended] == ends
        change = np.zeros(len(items) + 1, dtype=np.int64)
        born = np.flatnonzero(items >= 0)
        change[born] = self._rounded[items[born]]
        change[ends[deaths]] = -self._rounded[ended[deaths]]
        peaks: Floats = np.maximum.reduceat(np.cumsum(change), starts).astype(np.float64)
        return peaks


def _for_sizes(trace: Trace, sizes: Sequence[int]) -> Trace:
    """The trace of a step of so many micro-batches, of one that accumulates."""
    return trace if len(sizes) > 1 else without_second(trace)


def _alike(one: Trace, other: Trace) -> bool:
    return (one.events, one.cuts, one.ends) == (other.events, other.cuts, other.ends)
