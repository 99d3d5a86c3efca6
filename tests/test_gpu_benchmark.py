"""The benchmark for the day with a GPU: known to work before that day."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu, snapshots
from benchmarks.recordings import Recording, compare

TRACE = [
    {"action": "segment_alloc", "addr": 0, "size": 20 << 20},
    {"action": "alloc", "addr": 0, "size": 3 << 20},
    {"action": "free_requested", "addr": 0, "size": 3 << 20},
    {"action": "free_completed", "addr": 0, "size": 3 << 20},
    {"action": "alloc", "addr": 0, "size": 5 << 20},
    {"action": "snapshot", "addr": 0, "size": 0},
]


def test_a_memory_history_becomes_a_recording() -> None:
    """Frees count when they are completed; what is no request is left out; the replay agrees with the device."""
    content = snapshots.recording_of({"device_traces": [[], TRACE]}, reserved_bytes=20 << 20)
    assert [event[0] for event in content["events"]] == ["segment_alloc", "alloc", "free", "alloc"]
    events = [tuple(event) for event in content["events"]]
    assert compare(Recording("made up", [], events, content["final_reserved_bytes"])).exact
    row = snapshots.judged({**content, "kind": "default", "retries": 0} | PEAKS)
    assert (row["reserved_ratio"], row["allocated_ratio"], row["address_mismatches"]) == (1, 1, 0)


PEAKS = {"peak_reserved_bytes": 20 << 20, "peak_allocated_bytes": 5 << 20}


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And names the dry run."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "--dry-run" in capsys.readouterr().err


def test_the_dry_run_goes_through_a_part_and_is_resumed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A part writes its own file; what is finished is not run again."""
    arguments = ["--dry-run", "--part", "snapshots", "--out", str(tmp_path), "--minutes", "5"]
    assert gpu.main(arguments) == 0
    written = json.loads((tmp_path / "snapshots.json").read_text())
    assert written["finished"]
    assert written["dry"]
    assert written["rows"][0]["reserved_ratio"] == 1
    assert written["environment"]["torch"]
    assert gpu.main(arguments) == 0
    assert "done before" in capfd.readouterr().out


@pytest.mark.slow
def test_the_dry_run_goes_through_every_part(tmp_path: Path) -> None:
    """With tiny models on the CPU; no part fails, and every one has rows."""
    assert gpu.main(["--dry-run", "--out", str(tmp_path), "--minutes", "30"]) == 0
    for part in gpu.PARTS:
        rows = json.loads((tmp_path / f"{part}.json").read_text())["rows"]
        assert rows
        assert not [row for row in rows if "failed" in row]
