"""`python -m autofit` as a process: quick to answer, clean in pipes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "torchvision", "optuna", "transformers", "timm", "numpy")
ENVIRONMENT = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR", "NO_COLOR")}


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a fresh interpreter with UTF-8 streams and no terminal."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**ENVIRONMENT, "PYTHONIOENCODING": "utf-8", **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["tune", "--help"], 0),
        (["predict", "--help"], 0),
        ([], 2),
        (["--model", "x", "--nonsense"], 2),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(arguments: list[str], code: int) -> None:
    """Help, version and usage errors answer without torch."""
    script = (
        "import sys\n"
        "from autofit.cli.app import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "finally:\n"
        f"    print('imported:', [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    finished = python("-c", script)
    assert finished.returncode == code, finished.stderr
    assert finished.stderr.splitlines()[-1] == "imported: []"


def test_help_names_every_option_within_80_columns() -> None:
    """The help is complete and fits a terminal; no colour codes in a pipe."""
    finished = python("-m", "autofit", "--help")
    search = [
        "precision",
        "checkpointing",
        "micro-batch-size",
        "max-trials",
        "timeout",
        "seed",
        "storage",
        "study-name",
    ]
    model = ["model", "target-batch", "optimizer", "image-size", "sequence-length", "device", "budget"]
    options = [*model, *search, "json", "out", "version", "help"]
    assert [option for option in options if f"--{option} " not in finished.stdout] == []
    assert max(map(len, finished.stdout.splitlines())) <= 80
    assert "\x1b" not in finished.stdout


def test_version_is_the_packages(tmp_path: Path) -> None:
    """From anywhere, as the module and in one line."""
    import autofit

    assert python("-m", "autofit", "--version").stdout == f"autofit {autofit.__version__}\n"


def test_an_encoding_without_the_signs_does_not_end_the_run() -> None:
    """A terminal that knows ASCII only shows replacements."""
    finished = python("-m", "autofit", "--help", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert finished.returncode == 0, finished.stderr
    assert "--model" in finished.stdout


def test_an_unknown_model_is_one_clear_message() -> None:
    """The whole path with torchvision: exit 1, near misses, no traceback."""
    finished = python("-m", "autofit", "--model", "resnt18")
    assert finished.returncode == 1
    assert finished.stdout == ""
    (line,) = finished.stderr.splitlines()
    assert line.startswith("autofit: 'resnt18' is no torchvision model. Did you mean 'resnet18'")
