"""The README's figures are those of `benchmarks/results/`, and every benchmark of the short version can be started."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import SHORT

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# | claim | figure | file.json: name |
ROW = re.compile(r"^\| [^|]+ \| (?P<figure>[^|]+) \| `(?P<file>[\w./]+\.json)`: `(?P<name>\w+)` \|$", re.MULTILINE)
NUMBER = re.compile(r"(-?[\d,]+(?:\.(\d+))?) ?(%?)")


def section() -> str:
    """The README's section on figures."""
    _, rest = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Figures\n")
    return rest.split("\n## ")[0]


def test_every_figure_has_its_source() -> None:
    """Each row of the table names a result, and shows its figure as far as it is written out."""
    rows = [match.groupdict() for match in ROW.finditer(section())]
    table = [line for line in section().splitlines() if line.startswith("| ")][1:]  # less the heading
    assert len(rows) == len(table) >= 5
    for row in rows:
        value = json.loads((RESULTS / row["file"]).read_text(encoding="utf-8"))["figures"][row["name"]]
        found = NUMBER.match(row["figure"])
        assert found is not None, row
        written, decimals, per_cent = found.groups()
        shown = value * 100 if per_cent and not row["name"].endswith("percent") else value
        assert float(written.replace(",", "")) == round(shown, len(decimals or "")), (row, value)


def test_results_say_where_they_are_from() -> None:
    """Command, date, machine and versions are in each, and no path of a machine."""
    files = sorted(RESULTS.glob("*.json"))
    assert files
    for file in files:
        text = file.read_text(encoding="utf-8")
        document = json.loads(text)
        assert document["command"].startswith("python -m benchmarks."), file
        assert {"date", "torch", "python", "processor", "cores", "threads"} <= document["environment"].keys(), file
        assert document["figures"], file
        assert not re.search(r"/(home|root|tmp|work)/", text), file


@pytest.mark.parametrize("name", SHORT)
def test_each_benchmark_of_the_short_version_knows_its_arguments(name: str) -> None:
    """What `python -m benchmarks` passes is in its help."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    for argument in ("--out", *SHORT[name]):
        assert not argument.startswith("--") or argument in done.stdout


def test_the_short_version_runs_and_writes_results(tmp_path: Path) -> None:
    """The quickest of them, as a user would start them."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "tracker", "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    document = json.loads((tmp_path / "tracker.json").read_text(encoding="utf-8"))
    assert document["command"] == "python -m benchmarks.tracker"
    assert f"tracker_microseconds={document['figures']['tracker_microseconds']}" in done.stdout


def test_an_unknown_benchmark_is_named() -> None:
    """With those that there are."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "speed"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 2
    assert "no benchmark speed; allowed: startup" in done.stderr
