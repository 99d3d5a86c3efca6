"""Is the allocator model the allocator? `python -m benchmarks.allocator FILE_OR_FOLDER…` replays recordings of GPUs.

Prints one line per file, and exits with 1 when anything differs. `--speed` prints how many requests and frees the model
serves per second.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from autofit.memory.replay import replay
from benchmarks.recordings import Recording, compare
from benchmarks.results import add_out, write


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 when every recording is matched exactly, 1 for a mismatch, 2 when there is nothing to read."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allocator", description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, metavar="FILE_OR_FOLDER", help=f"default: {default_folder()}")
    parser.add_argument("--speed", action="store_true", help="also print events per second")
    add_out(parser)
    options = parser.parse_args(arguments)
    files = [file for path in options.paths or [default_folder()] for file in recordings_in(path)]
    if not files:
        print("No recordings found; name a .json or .json.gz file, or a folder that holds some.", file=sys.stderr)
        return 2
    recordings = [Recording.read(file) for file in files]
    comparisons = [compare(recording) for recording in recordings]
    for comparison in comparisons:
        print(comparison)
    figures = {"recordings": len(comparisons), "exact": sum(comparison.exact for comparison in comparisons)}
    if options.speed:
        figures["events_per_second"] = round(events_per_second(recordings))
        print(f"events_per_second={figures['events_per_second']}")
    write(options.out, figures=figures, rows=[{"comparison": str(comparison)} for comparison in comparisons])
    return 0 if figures["exact"] == len(comparisons) else 1


def default_folder() -> Path:
    """`allocator/` in the folder that AUTOFIT_DATA names, or in `shared/data` beside the repository."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    return Path(os.environ.get("AUTOFIT_DATA", beside)) / "allocator"


def recordings_in(path: Path) -> list[Path]:
    """The file itself, or the recordings in a folder by name."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.name.endswith((".json", ".json.gz")))
    return [path] if path.exists() else []


def events_per_second(recordings: Sequence[Recording], *, repeats: int = 5) -> float:
    """The best of several replays of all recordings, each request and each free counting one."""
    streams = [recording.births_and_deaths() for recording in recordings]
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        for events in streams:
            replay(events)
        seconds.append(time.perf_counter() - start)
    return sum(map(len, streams)) / min(seconds)


if __name__ == "__main__":
    sys.exit(main())
