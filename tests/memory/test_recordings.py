"""The allocator model against recordings of real GPUs, and the command that does so."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from autofit.memory import fit_threshold, replay
from autofit.units import MiB
from benchmarks.allocator import default_folder, main, recordings_in
from benchmarks.recordings import Recording, compare

FILES = recordings_in(default_folder())
needs_recordings = pytest.mark.skipif(not FILES, reason=f"no recordings in {default_folder()}; set AUTOFIT_DATA")


@needs_recordings
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.removesuffix(".json.gz"))
def test_the_model_is_the_allocator(file: Path) -> None:
    """Every address, every segment and the final reserved bytes are those that the GPU had."""
    comparison = compare(Recording.read(file))
    assert comparison.allocations > 0
    assert comparison.exact, str(comparison)


@needs_recordings
@pytest.mark.parametrize(
    ("name", "allocated", "reserved", "threshold"),
    [
        ("niu_forward_and_backward_memory_snapshot_100", 663, 750, 716),
        ("niu_forward_and_backward_memory_snapshot_200", 1177, 1326, 1310),
        ("niu_forward_and_backward_memory_snapshot_200_mixed_precision", 939, 1150, 1064),
    ],
)
def test_three_peaks_of_real_training(name: str, allocated: int, reserved: int, threshold: int) -> None:
    """Allocated peak, reserved peak and fit threshold in MiB of recorded training steps."""
    events = Recording.read(default_folder() / f"{name}.json.gz").births_and_deaths()
    peaks = replay(events)
    found = peaks.peak_allocated_bytes // MiB, peaks.peak_reserved_bytes // MiB, fit_threshold(events) / MiB
    assert found == (allocated, reserved, threshold)


# A step with a cached segment that the device gave back before it asked for another one.
EVENTS: list[list[Any]] = [
    ["segment_alloc", 0, 32 * MiB],
    ["alloc", 0, 31 * MiB],
    ["free", 0],
    ["segment_free", 0, 32 * MiB],
    ["segment_alloc", 64 * MiB, 40 * MiB],
    ["alloc", 64 * MiB, 40 * MiB],
]


def write(path: Path, events: list[list[Any]], *, reserved: int = 40 * MiB) -> Path:
    path.write_bytes(
        gzip.compress(json.dumps({"initial_segments": [], "events": events, "final_reserved_bytes": reserved}).encode())
    )
    return path


def changed(index: int, event: list[Any] | None) -> list[list[Any]]:
    return [*EVENTS[:index], *([] if event is None else [event]), *EVENTS[index + 1 :]]


@pytest.mark.parametrize(
    ("events", "reserved", "expected"),
    [
        (EVENTS, 40 * MiB, (0, 0, True)),
        (EVENTS, 42 * MiB, (0, 0, False)),
        (changed(0, ["segment_alloc", 0, 34 * MiB]), 40 * MiB, (0, 1, True)),
        (changed(3, ["segment_free", 0, 34 * MiB]), 40 * MiB, (0, 2, True)),  # one was not given back, another was
        (changed(1, ["alloc", 512, 31 * MiB])[:2], 32 * MiB, (1, 0, True)),
        (changed(4, None), 40 * MiB, (1, 1, True)),  # the model needs a segment where the device did not
        ([*EVENTS, ["segment_alloc", 0, 2 * MiB], ["alloc", 64 * MiB, 4 * MiB]], 60 * MiB, (1, 1, True)),
        # The device asked for a segment where the model has a free block.
        (
            [*EVENTS, ["free", 64 * MiB], ["segment_alloc", 0, 40 * MiB], ["alloc", 0, 40 * MiB]],
            80 * MiB,
            (1, 1, False),
        ),
        ([*EVENTS, ["segment_free", 0, 2 * MiB]], 40 * MiB, (0, 1, True)),  # nothing is unused by then
    ],
)
def test_every_difference_is_counted(
    tmp_path: Path, events: list[list[Any]], reserved: int, expected: tuple[int, int, bool]
) -> None:
    """A wrong address, a segment too many, too few or of another size, and other reserved bytes are all seen."""
    comparison = compare(Recording.read(write(tmp_path / "one.json.gz", events, reserved=reserved)))
    assert (comparison.address_mismatches, comparison.segment_mismatches, comparison.reserved_exact) == expected


def test_the_command_prints_a_line_per_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The line that other scripts read, and 1 as soon as any file differs."""
    good = write(tmp_path / "good.json.gz", EVENTS)
    assert main([str(good)]) == 0
    line = "good allocations=2 address_mismatches=0 segment_mismatches=0 reserved_exact=true\n"
    assert capsys.readouterr().out == line
    write(tmp_path / "bad.json.gz", EVENTS, reserved=0)
    assert main([str(tmp_path)]) == 1
    bad = "bad allocations=2 address_mismatches=0 segment_mismatches=0 reserved_exact=false\n"
    assert capsys.readouterr().out == bad + line


def test_the_command_says_when_there_is_nothing_to_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty folder is not a success."""
    assert main([str(tmp_path)]) == 2
    assert "No recordings" in capsys.readouterr().err


def test_the_command_measures_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--speed` adds events per second."""
    assert main([str(write(tmp_path / "one.json.gz", EVENTS)), "--speed"]) == 0
    assert int(capsys.readouterr().out.splitlines()[-1].removeprefix("events_per_second=")) > 0
