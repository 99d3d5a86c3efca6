"""Recordings of this machine's CUDA allocator, made from PyTorch's own memory history, and held against the model.

    python -m benchmarks.snapshots {default,capped,expandable,streams} FILE

Trains a small model from the first allocation on and writes the recording in the format of `benchmarks.recordings`,
with the allocator's own peaks. `expandable` needs `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` to be set.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autofit.memory import replay
from autofit.memory.config import AllocatorConfig
from benchmarks.recordings import Recording, compare

KINDS = ("default", "capped", "expandable", "streams")
STEPS = 3
CAPPED_FRACTION = 0.05
_KEPT = {"alloc": "alloc", "free_completed": "free", "segment_alloc": "segment_alloc", "segment_free": "segment_free"}


def events_of(trace: Iterable[Mapping[str, Any]]) -> list[list[Any]]:
    """One device's trace of `torch.cuda.memory._snapshot()` as events of a recording."""
    events: list[list[Any]] = []
    for entry in trace:
        action = _KEPT.get(entry["action"])
        if action == "free":
            events.append([action, entry["addr"]])
        elif action is not None:
            events.append([action, entry["addr"], entry["size"]])
    return events


def recording_of(snapshot: Mapping[str, Any], *, reserved_bytes: int) -> dict[str, Any]:
    """A recording from the first allocation on, of the device that was used."""
    (trace,) = [trace for trace in snapshot["device_traces"] if trace]
    return {"initial_segments": [], "events": events_of(trace), "final_reserved_bytes": reserved_bytes}


def record(kind: str) -> dict[str, Any]:
    """Trains on the current CUDA device; call it before anything else has used the allocator."""
    if kind == "capped":
        torch.cuda.set_per_process_memory_fraction(CAPPED_FRACTION)
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, context=None, stacks="python")
    _train(streams=2 if kind == "streams" else 1)
    torch.cuda.synchronize()
    statistics = torch.cuda.memory_stats()
    recording = recording_of(torch.cuda.memory._snapshot(), reserved_bytes=torch.cuda.memory_reserved())
    torch.cuda.memory._record_memory_history(enabled=None)
    return {
        **recording,
        "kind": kind,
        "peak_reserved_bytes": statistics["reserved_bytes.all.peak"],
        "peak_allocated_bytes": statistics["allocated_bytes.all.peak"],
        "retries": statistics["num_alloc_retries"],
    }


def _train(streams: int) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 128, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(128 * 64, 1000),
    ).cuda()  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    side = [torch.cuda.Stream() for _ in range(streams - 1)]
    for samples in range(32, 32 + 8 * STEPS, 8):
        loss = model(torch.randn(samples, 3, 64, 64, device="cuda")).square().mean()
        for stream in side:
            with torch.cuda.stream(stream):
                torch.randn(1 << 20, device="cuda").square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def judged(content: Mapping[str, Any]) -> dict[str, Any]:
    """How the model and a recording agree: address by address by default, and in their peaks."""
    recording = Recording(
        "recorded here", [], [tuple(event) for event in content["events"]], content["final_reserved_bytes"]
    )
    config = AllocatorConfig(expandable_segments=content["kind"] == "expandable")
    peaks = replay(recording.births_and_deaths(), config=config)
    row: dict[str, Any] = {
        "kind": content["kind"],
        "allocations": sum(event[0] == "alloc" for event in recording.events),
        "reserved_ratio": peaks.peak_reserved_bytes / content["peak_reserved_bytes"],
        "allocated_ratio": peaks.peak_allocated_bytes / content["peak_allocated_bytes"],
        "retries": content["retries"],
    }
    if content["kind"] in ("default", "capped"):
        comparison = compare(recording)
        row["address_mismatches"] = comparison.address_mismatches
        row["segment_mismatches"] = comparison.segment_mismatches
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Records and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("file", type=Path)
    options = parser.parse_args(arguments)
    options.file.write_text(json.dumps(record(options.kind)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
