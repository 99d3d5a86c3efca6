"""What `import autofit` costs, beside the torch that its users import anyway.

    python -m benchmarks.startup [--rounds 7] [--out FILE]

Each import runs in a fresh interpreter, in turns; CPU seconds, the median of the rounds, less those of an interpreter
that imports nothing.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys

from benchmarks.results import add_out, write

CODE = {
    "nothing": "pass",
    "import autofit": "import autofit",
    "import torch": "import torch",
    "autofit.tune": "import torch, autofit; autofit.tune",
}


def cpu_seconds(code: str) -> float:
    """CPU seconds of an interpreter that runs `code`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    add_out(parser)
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in CODE}
    for number in range(-1, options.rounds):  # the first brings the files into the system's cache
        for name, code in CODE.items():
            seconds = cpu_seconds(code)
            if number >= 0:
                times[name].append(seconds)
    median = {name: statistics.median(values) for name, values in times.items()}
    alone = {name: median[name] - median["nothing"] for name in CODE}
    figures = {
        "import_autofit_over_torch": round(alone["import autofit"] / alone["import torch"], 4),
        "autofit_tune_over_torch": round(alone["autofit.tune"] / alone["import torch"], 2),
    }
    for name, value in alone.items():
        print(f"{name:16} {value * 1e3:8.1f} ms of CPU")
    print(" ".join(f"{name}={value}" for name, value in figures.items()))
    write(options.out, figures=figures, rows=[{"code": name, "cpu_seconds": value} for name, value in median.items()])


if __name__ == "__main__":
    main()
