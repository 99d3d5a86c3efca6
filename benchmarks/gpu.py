"""Everything that needs a real GPU, in one command of at most 9 minutes; what is most valuable comes first.

    python -m benchmarks.gpu [--out benchmarks/results/gpu] [--minutes 9] [--part NAME …] [--again]
    python -m benchmarks.gpu --dry-run

Each part runs in a process of its own and writes OUT/PART.json as it goes, so a run that was cut short is continued by
the same command. Nothing is installed or downloaded; what is not there (transformers, pytest) is left out and named.
`--dry-run` goes through all parts on the CPU with tiny models.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu_parts import PARTS, Report
from benchmarks.results import environment

# Share of the minutes that a part may take of those that are left when it begins.
SHARES = {"tests": 0.25, "snapshots": 0.2, "memory": 0.5, "seconds": 0.5, "search": 0.8, "overhead": 1.0}


def run_all(out: Path, *, minutes: float, parts: Sequence[str], again: bool, dry: bool) -> int:
    """Runs the parts that have no finished report yet; 1 when one of them failed."""
    out.mkdir(parents=True, exist_ok=True)
    deadline, failed = time.monotonic() + minutes * 60, 0
    for part in parts:
        file = out / f"{part}.json"
        if file.exists() and not again and json.loads(file.read_text()).get("finished"):
            print(f"{part:<10} done before: {file}", flush=True)
            continue
        seconds = (deadline - time.monotonic()) * SHARES[part]
        if seconds < 5:
            print(f"{part:<10} no time left", flush=True)
            continue
        began = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu",
            "--inside",
            part,
            "--out",
            str(out),
            "--minutes",
            f"{seconds / 60}",
        ]
        # A part ends by itself when its time is over; one that hangs is ended.
        process = subprocess.Popen([*command, *(["--dry-run"] if dry else [])])
        try:
            code = process.wait(timeout=seconds * 1.2 + 30)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        failed += code != 0
        print(
            f"{part:<10} {'ok' if code == 0 else f'exit {code}'} in {time.monotonic() - began:.0f} s: {file}",
            flush=True,
        )
    return 1 if failed else 0


def run_inside(part: str, out: Path, *, minutes: float, dry: bool) -> int:
    """One part, in this process."""
    report = Report(out / f"{part}.json", environment=environment(), seconds=minutes * 60, dry=dry)
    PARTS[part](report)
    report.finish()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is asked for; 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--part", choices=tuple(PARTS), action="append")
    parser.add_argument("--again", action="store_true", help="also what is finished")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny models")
    parser.add_argument("--inside", choices=tuple(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("There is no CUDA device here; --dry-run goes through the parts without one.", file=sys.stderr)
        return 2
    if options.inside:
        return run_inside(options.inside, options.out, minutes=options.minutes, dry=options.dry_run)
    default = Path(tempfile.mkdtemp()) if options.dry_run else Path(__file__).parent / "results" / "gpu"
    parts = options.part or tuple(PARTS)
    return run_all(
        options.out or default, minutes=options.minutes, parts=parts, again=options.again, dry=options.dry_run
    )


if __name__ == "__main__":
    raise SystemExit(main())
