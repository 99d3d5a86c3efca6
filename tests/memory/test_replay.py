"""Replaying births and deaths: peaks, running out, and the smallest cap that is enough."""

from __future__ import annotations

import subprocess
import sys
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit.memory import AllocatorConfig, Event, Peaks, fit_threshold, replay
from autofit.units import KiB, MiB

sizes = st.one_of(st.integers(1, 100 * KiB), st.integers(MiB, 12 * MiB), st.integers(10 * MiB, 40 * MiB))


@st.composite
def event_lists(draw: st.DrawFn) -> list[Event]:
    """Births, and deaths of what is alive; some of it stays alive."""
    events: list[Event] = []
    alive: list[int] = []
    for number, nbytes in enumerate(draw(st.lists(sizes, min_size=1, max_size=40))):
        events.append((number, nbytes))
        alive.append(number)
        deaths = draw(st.integers(0, min(2, len(alive))))
        events.extend((alive.pop(draw(st.integers(0, len(alive) - 1))), 0) for _ in range(deaths))
    return events


def most_requested(events: list[Event]) -> int:
    """The most bytes that are alive at once."""
    born = dict(event for event in events if event[1])
    return max(accumulate(nbytes or -born[storage] for storage, nbytes in events))


def test_a_replay_gives_the_peaks() -> None:
    """The allocated peak counts blocks, the reserved one segments."""
    events = [(1, 30 * MiB), (2, 100), (1, 0), (3, 10 * MiB)]
    assert replay(events) == Peaks(
        30 * MiB + 100, peak_allocated_bytes=30 * MiB + 512, peak_reserved_bytes=32 * MiB, retries=0
    )
    assert replay(events).fits


def test_a_replay_stops_where_memory_runs_out() -> None:
    """`out_of_memory_at` is the index of the birth without room, and the peaks are those before it."""
    events = [(1, 30 * MiB), (1, 0), (2, 20 * MiB), (3, 20 * MiB), (2, 0)]
    peaks = replay(events, 36 * MiB)
    assert peaks == Peaks(30 * MiB, 30 * MiB, 30 * MiB, retries=1, out_of_memory_at=3)
    assert not peaks.fits


def test_the_threshold_lies_between_both_peaks() -> None:
    """What is cached at the reserved peak need not be there, so less is enough."""
    events = [(1, 30 * MiB), (1, 0), (2, 40 * MiB), (3, 2 * MiB)]
    assert replay(events).peak_reserved_bytes == 70 * MiB
    assert fit_threshold(events) == 60 * MiB


@settings(max_examples=150, deadline=None)
@given(events=event_lists())
def test_the_threshold_is_enough_and_a_byte_less_is_not(events: list[Event]) -> None:
    """Under the threshold every birth finds room; under one byte less, and one segment less, one does not."""
    threshold = fit_threshold(events)
    peaks = replay(events)
    assert most_requested(events) <= threshold <= peaks.peak_reserved_bytes
    assert replay(events, threshold).fits
    assert replay(events, threshold).peak_reserved_bytes == threshold
    assert not replay(events, threshold - 1).fits


@pytest.mark.parametrize(
    "config",
    [
        AllocatorConfig(expandable_segments=True),
        AllocatorConfig(max_split_size=20 * MiB),
        AllocatorConfig(garbage_collection_threshold=0.7),
    ],
    ids=["expandable", "max_split", "collecting"],
)
@settings(max_examples=50, deadline=None)
@given(events=event_lists())
def test_the_threshold_is_enough_under_every_option(config: AllocatorConfig, events: list[Event]) -> None:
    """With options too the cap that is named is enough, and less is not: by a byte, or by 2 MiB with collection."""
    threshold = fit_threshold(events, config)
    step = 2 * MiB if config.garbage_collection_threshold else 1
    assert replay(events, threshold, config).fits
    assert not replay(events, max(threshold - step, 0), config).fits


def test_collecting_early_can_need_more_than_collecting_never() -> None:
    """What garbage collection gives back it may miss later, so its cap can lie above the peak without a cap."""
    config = AllocatorConfig(garbage_collection_threshold=0.5)
    sizes = [
        (1, 18),
        (2, 7),
        (3, 8),
        (4, 7),
        (4, 0),
        (2, 0),
        (1, 0),
        (3, 0),
        (5, 5),
        (6, 29),
        (6, 0),
        (7, 20),
        (8, 19),
        (9, 26),
    ]
    events = [(storage, mebibytes * MiB) for storage, mebibytes in sizes]
    uncapped = replay(events, None, config).peak_reserved_bytes
    assert not replay(events, uncapped, config).fits
    assert uncapped < fit_threshold(events, config) <= uncapped + 20 * MiB


def test_nothing_needs_nothing() -> None:
    """Without events there is no peak and no cap."""
    assert replay([]) == Peaks(0, 0, 0, 0)
    assert fit_threshold([]) == 0


def test_the_allocator_model_needs_no_torch() -> None:
    """Importing the model and replaying loads neither torch nor NVML."""
    code = (
        "import sys; from autofit.memory import replay; replay([(1, 100)]); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'pynvml')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
