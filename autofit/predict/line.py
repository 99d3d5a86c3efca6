"""All micro-batches of one precision and checkpointing from a few traces: sizes are affine in the samples."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, compress

from autofit.memory.config import MIN_BLOCK
from autofit.predict.failures import UntraceableError
from autofit.predict.recorder import Trace

logger = logging.getLogger(__name__)

# Two sizes give the line, a third checks it where a trace takes less than CHECK_SECONDS. None of them is 1 (batch
# normalisation refuses it), and they share no factor.
SIZES = (3, 5)
CHECK_SIZE = 8
CHECK_SECONDS = 1.5


@dataclass(frozen=True)
class SizedTrace:
    """A trace and the bytes of its storages at the size that was asked for."""

    trace: Trace
    sizes: list[int]

    def blocks(self) -> list[int]:
        """Bytes of the allocator's block for each storage."""
        return [-(-size // MIN_BLOCK) * MIN_BLOCK for size in self.sizes]

    def in_use(self) -> list[int]:
        """Bytes in use after each event of the trace."""
        blocks = self.blocks()
        return list(accumulate(blocks[event] if event >= 0 else -blocks[~event] for event in self.trace.events))

    def without_scratch(self) -> SizedTrace:
        """The same less what operators take for themselves while they run."""
        pairs = zip(self.sizes, self.trace.categories, strict=True)
        return replace(self, sizes=[0 if category == "scratch" else size for size, category in pairs])


class Line:
    """Answers every micro-batch size. `trace` traces one size; it takes as long for a large one as for a small one.

    Where sizes are not affine, or events differ from size to size, each size is traced when it is asked for, and
    `notes` says so.
    """

    def __init__(self, trace: Callable[[int], Trace]) -> None:
        self._trace = trace
        self._affine: _Affine | None = None
        self._direct: dict[int, Trace | UntraceableError] = {}
        self._failed = False
        self._ready = False
        self.notes: tuple[str, ...] = ()

    def at(self, samples: int, second: int) -> SizedTrace:
        """The trace with `samples` in the first micro-batch and `second` in the next one."""
        if not self._ready:
            self._affine = self._fit()
            self._ready = True
        if self._affine is not None:
            return self._affine.at(samples, second)
        trace = self._direct.get(samples)
        if trace is None:
            trace = self._direct[samples] = self._attempt(samples)
        if isinstance(trace, UntraceableError):
            raise trace
        return SizedTrace(trace, trace.sizes)

    def _attempt(self, samples: int) -> Trace | UntraceableError:
        """A size of its own. Once this one fails too, no other is tried."""
        failures = [trace for trace in self._direct.values() if isinstance(trace, UntraceableError)]
        if self._failed and failures:
            return failures[0]
        try:
            return self._trace(samples)
        except UntraceableError as error:
            return error

    def _fit(self) -> _Affine | None:
        try:
            began = time.perf_counter()
            low = self._trace(SIZES[0])
            seconds = time.perf_counter() - began
            high = self._trace(SIZES[1])
            affine, reason = _between(low, high)
            check = seconds < CHECK_SECONDS
            if affine and check and not _agree(affine.at(CHECK_SIZE, CHECK_SIZE), self._trace(CHECK_SIZE)):
                affine, reason = None, "sizes are not proportional to samples"
        except UntraceableError as error:
            self._failed = True
            affine, reason = None, f"a micro-batch of {' or '.join(map(str, SIZES))} cannot be traced ({error})"
        if affine is None:
            self.notes = (f"every micro-batch is traced by itself: {reason}",)
            logger.info("%s", self.notes[0])
        return affine


@dataclass(frozen=True)
class _Affine:
    """Bytes of storage i with n samples: `base[i] + slope[i] × n`."""

    trace: Trace
    base: list[int]
    slope: list[int]
    of_second: list[bool]

    def at(self, samples: int, second: int) -> SizedTrace:
        sizes = [base + slope * samples for base, slope in zip(self.base, self.slope, strict=True)]
        if second != samples:
            change = second - samples
            for index in compress(range(len(sizes)), self.of_second):
                sizes[index] += self.slope[index] * change
        return SizedTrace(self.trace, sizes)


def _between(low: Trace, high: Trace) -> tuple[_Affine | None, str]:
    if low.uneven:
        return None, "an operator keeps memory that does not grow evenly with the samples"
    if low.events != high.events or low.marks != high.marks:
        return None, f"with {SIZES[0]} and with {SIZES[1]} samples different operators run"
    span = SIZES[1] - SIZES[0]
    base, slope = [], []
    for small, large, category in zip(low.sizes, high.sizes, low.categories, strict=True):
        step, rest = divmod(large - small, span)
        if category == "scratch":  # a kernel's own need not grow evenly, and is not less where more samples run
            step = max(step, 0)
        elif rest:
            return None, "sizes are not proportional to samples"
        slope.append(step)
        base.append(small - step * SIZES[0])
    return _Affine(low, base, slope, born_in_second(low)), ""


def _agree(expected: SizedTrace, found: Trace) -> bool:
    """Whether a trace came out as expected; memory inside operators was not learned at its size and does not count."""
    seen = SizedTrace(found, found.sizes).without_scratch()
    return found.events == expected.trace.events and seen.sizes == expected.without_scratch().sizes


def born_in_second(trace: Trace) -> list[bool]:
    """Which storages belong to the second micro-batch of an optimizer step."""
    result = [False] * len(trace.sizes)
    ends = [*(at for at, _ in trace.marks[1:]), len(trace.events)]
    for (start, name), end in zip(trace.marks, ends, strict=False):
        if name == "micro 1":
            for event in trace.events[start:end]:
                if event >= 0:
                    result[event] = True
    return result
