"""The trace of any mask of checkpointing modes over blocks, from one trace per mode.

What happens while a block runs depends on that block's own mode only. So each mode is traced once, with all blocks in
it, and the events of a mask are those of the blocks in their modes, put together. What reaches across blocks is when a
storage dies: with the last that lets go of it, of those that hold it under this mask.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autofit.candidate import CheckpointingMode
from autofit.errors import AutofitError
from autofit.memory.config import MIN_BLOCK
from autofit.predict.recorder import Span, Trace


class WeaveError(AutofitError):
    """The traces of two modes differ in more than what their blocks do, so they cannot be put together."""


@dataclass(frozen=True)
class Segment:
    """A stretch of a trace in which one block runs, or none.

    `items` has births (`index`) and, of each storage that is let go in it, the last time (`~index`).
    """

    span: Span | None
    mark: str | None
    items: list[int]


class Weave:
    """Traces of the same step with all blocks in mode `none`, and in other modes, by whose segments masks are made.

    `origin[i]` says where storage i of a woven trace comes from: the mode, and the index in that mode's trace. Raises
    WeaveError.
    """

    def __init__(self, traces: Mapping[CheckpointingMode, Trace]) -> None:
        plain = list(_segments(traces["none"]))
        self.modes = tuple(traces)
        self.origin: list[tuple[CheckpointingMode, int]] = [("none", i) for i in range(len(traces["none"].sizes))]
        self.spans = tuple(segment.span for segment in plain)
        self._marks = [segment.mark for segment in plain]
        self._items: dict[CheckpointingMode, list[list[int]]] = {}
        for mode, trace in traces.items():
            names = {i: i for i in range(len(trace.sizes))} if mode == "none" else self._names(plain, traces, mode)
            self._items[mode] = [_renamed(segment.items, names) for segment in _segments(trace)]
        self._last_ends = {mode: _last_ends(segments) for mode, segments in self._items.items()}
        self._storages = self._merged(traces)

    @property
    def second_micro_step(self) -> range:
        """The segments of the last step's second micro-batch."""
        start = self._marks.index("micro 1")
        return range(start, next(at for at in range(start + 1, len(self._marks)) if self._marks[at] is not None))

    def items(self, segment: int, mode: CheckpointingMode) -> Sequence[int]:
        """Births and ends in a segment while its block is in `mode`; of all ends of a storage the last is its death."""
        return self._items[mode if self.spans[segment] is not None else "none"][segment]

    def trace(self, mask: Mapping[str, CheckpointingMode]) -> Trace:
        """The trace of the step with each block in its mode; blocks that `mask` leaves out are in mode `none`."""
        chosen: list[CheckpointingMode] = [mask.get(span[0], "none") if span else "none" for span in self.spans]
        parts = [self.items(at, mode) for at, mode in enumerate(chosen)]
        last = _last_ends(parts)
        for part, mode in zip(parts, chosen, strict=True):
            for item in part:
                # Let go only where another block was traced in another mode: no earlier than there.
                if item >= 0 and ~item not in last and ~item in self._last_ends[mode]:
                    last[~item] = -self._last_ends[mode][~item]
        late: dict[int, list[int]] = {}
        for item, at in last.items():
            if at < 0:
                late.setdefault(-at, []).append(item)
        events: list[int] = []
        marks: list[tuple[int, str]] = []
        for at, part in enumerate(parts):
            if (mark := self._marks[at]) is not None:
                marks.append((len(events), mark))
            events += [item for item in part if item >= 0 or last[item] == at]
            events += late.get(at, ())
        return replace(self._storages, events=events, marks=marks, cuts=[(at, None, mark) for at, mark in marks])

    def _names(
        self, plain: Sequence[Segment], traces: Mapping[CheckpointingMode, Trace], mode: CheckpointingMode
    ) -> dict[int, int]:
        """What the storages of a mode's trace are called in woven ones: like those of mode `none` that they stand for.

        In forward a block makes what it makes without recomputation, after copies of what it will need again; in
        backward what it makes without, and what it recomputes.
        """
        trace, names = traces[mode], dict(zip(_workspaces(traces[mode]), _workspaces(traces["none"]), strict=False))
        workspaces = set(_workspaces(traces["none"]))
        segments = list(_segments(trace))
        if [(s.span, s.mark) for s in segments] != [(s.span, s.mark) for s in plain]:
            raise WeaveError(f"with checkpointing {mode!r} blocks run in another order than without")
        for mine, other in zip(segments, plain, strict=True):
            again = trace.recomputed if mine.span else ()
            births = [i for i in mine.items if i >= 0 and i not in again and i not in names]
            wanted = [i for i in other.items if i >= 0 and i not in workspaces]
            while births and wanted:
                index = births.pop()
                if _are_alike(trace, index, traces["none"], wanted[-1]):
                    names[index] = wanted.pop()
            if wanted or (mine.span is None and births):
                raise WeaveError(f"with checkpointing {mode!r} other operators run in {mine.span or mine.mark}")
        for index in range(len(trace.sizes)):
            if index not in names:
                names[index] = len(self.origin)
                self.origin.append((mode, index))
        return names

    def _merged(self, traces: Mapping[CheckpointingMode, Trace]) -> Trace:
        """What is known of every storage of every mode, without events."""
        merged = Trace(notes={note: None for trace in traces.values() for note in trace.notes})
        for mode, index in self.origin:
            trace = traces[mode]
            merged.sizes.append(trace.sizes[index])
            merged.categories.append(trace.categories[index])
            merged.phases.append(trace.phases[index])
            merged.operators.append(trace.operators[index])
            merged.modules.append(trace.modules[index])
        return merged


def _segments(trace: Trace) -> Iterator[Segment]:
    ends = deque(trace.ends)
    stops = [*(at for at, _, _ in trace.cuts), len(trace.events)]
    for number, ((start, span, mark), stop) in enumerate(zip([(0, None, None), *trace.cuts], stops, strict=True)):
        items: list[int] = []
        for at in range(start, stop + 1):
            while ends and (ends[0][0] < number or (ends[0][0] == number and (ends[0][1] <= at or at == stop))):
                items.append(~ends.popleft()[2])
            items += trace.events[at : at + 1] if at < stop else ()
        last = {item: at for at, item in enumerate(items)}
        yield Segment(span, mark, [item for at, item in enumerate(items) if last[item] == at])


def _workspaces(trace: Trace) -> list[int]:
    """Blocks that libraries take once and keep: whichever operator is the first to need them, they are the same."""
    return [index for index, category in enumerate(trace.categories) if category == "workspaces"]


def _are_alike(trace: Trace, index: int, plain: Trace, other: int) -> bool:
    """Whether both are the same result of an operator. The last row of what is padded may be cut in one of them."""
    difference = abs(trace.sizes[index] - plain.sizes[other])
    return trace.operators[index] == plain.operators[other] and difference < MIN_BLOCK


def _renamed(items: Sequence[int], names: Mapping[int, int]) -> list[int]:
    return [names[item] if item >= 0 else ~names[~item] for item in items]


def _last_ends(segments: Sequence[Sequence[int]]) -> dict[int, int]:
    """In which segment each storage is let go for the last time."""
    return {item: at for at, items in enumerate(segments) for item in items if item < 0}
