"""Every claim measured again, the short way: `python -m benchmarks [NAME …] [--folder FOLDER]`.

Each benchmark runs in a process of its own and writes its result to FOLDER/NAME.json, by default
`benchmarks/results`. Takes about ten minutes on two cores. Exits 1 when one of them failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.results import FOLDER

# What each is run with, the quickest first.
SHORT: dict[str, tuple[str, ...]] = {
    "startup": (),
    "tracker": (),
    "allocator": ("--speed",),
    "overhead": ("--steps", "200"),
    "leaks": ("--trials", "60"),
    "search": ("--quick",),
    "checkpointing": ("--quick",),
    "peers": ("--rounds", "1", "--quick"),
    "prediction": ("--quick",),
}
ABSENT = 2  # what a benchmark exits with when the recordings that it needs are not there


def run(name: str, out: Path) -> int:
    """Runs one; its output is shown only when it failed. The exit code."""
    began = time.monotonic()
    command = [sys.executable, "-m", f"benchmarks.{name}", *SHORT[name], "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    if done.returncode == 0:
        figures = json.loads(out.read_text(encoding="utf-8"))["figures"]
        print(
            f"{name:14}{seconds:5.0f} s  " + "  ".join(f"{key}={value}" for key, value in figures.items()), flush=True
        )
    elif done.returncode == ABSENT:
        print(f"{name:14}{seconds:5.0f} s  left out: {done.stderr.strip().splitlines()[-1]}", flush=True)
    else:
        print(f"{name:14}{seconds:5.0f} s  failed with {done.returncode}\n{done.stdout}\n{done.stderr}", flush=True)
    return 0 if done.returncode == ABSENT else done.returncode


def main() -> int:
    """Runs those that are named, or all."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SHORT))
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    if unknown := set(options.names) - set(SHORT):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; allowed: {', '.join(SHORT)}")
    codes = [run(name, options.folder / f"{name}.json") for name in options.names or SHORT]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
