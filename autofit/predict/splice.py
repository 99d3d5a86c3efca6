"""The step without accumulation, cut out of the trace of one that accumulates."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from autofit.predict.recorder import Trace


def without_second(trace: Trace) -> Trace:
    """`trace` less its second micro-batch: what a step of one micro-batch does, since the first runs as it does alone.

    Storages that were born in the second micro-batch stay in the lists and leave the events.
    """
    start, end = next(at for at, name in trace.marks if name == "micro 1"), trace.marks[-1][0]
    gone = {event for event in trace.events[start:end] if event >= 0}
    kept = [at for at, event in enumerate(trace.events) if (event if event >= 0 else ~event) not in gone]
    return replace(
        trace,
        events=[trace.events[at] for at in kept],
        marks=[(bisect_left(kept, at), name) for at, name in trace.marks if name != "micro 1"],
    )
