"""Results as files: what was run, where and when, its rows, and the figures that the README quotes."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import autofit
from autofit.device import device_info

FOLDER = Path(__file__).parent / "results"
_PACKAGES = ("torch", "torchvision", "optuna", "transformers", "lightning", "accelerate")


def environment() -> dict[str, Any]:
    """Where and when: versions, the processor or the GPU, threads, the date."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "autofit": autofit.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": device_info(torch.device("cpu")).name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "capability": list(torch.cuda.get_device_capability(0)),
            "total_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return found


def add_out(parser: argparse.ArgumentParser) -> None:
    """The option that all benchmarks share."""
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write figures, rows and environment as JSON")


def write(
    out: Path | None,
    *,
    figures: Mapping[str, float | int | str | bool],
    rows: Sequence[Mapping[str, Any]] = (),
    **more: Any,
) -> None:
    """Writes one result, if a file was asked for: `figures` by name, and the `rows` that they are drawn from."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    document = {"command": _command(), "environment": environment(), "figures": dict(figures), **more}
    head = json.dumps(document, indent=2, default=str).removesuffix("\n}")
    lines = ",\n".join(f"    {json.dumps(row, default=str)}" for row in rows)
    out.write_text(f'{head},\n  "rows": [\n{lines}\n  ]\n}}\n', encoding="utf-8")


def _command() -> str:
    """What was typed, without the file that the result goes to."""
    module = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", None) or "?"
    arguments = iter(sys.argv[1:])
    kept = []
    for argument in arguments:
        if argument == "--out":
            next(arguments, None)
        elif not argument.startswith("--out="):
            kept.append(Path(argument).name if os.sep in argument else argument)
    return " ".join(["python", "-m", module.removesuffix(".__main__"), *kept])
