"""Models of the user's own, from a file or a module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autofit.candidate import SearchSpace
from autofit.cli.models import load_workload
from autofit.errors import ConfigError

GOOD = """
import torch
from torch import nn

def build():
    return {"model": nn.Linear(4, 2), "sample_batch": (torch.randn(3, 4), torch.randint(2, (3,))), "target_batch": 6}
"""


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    """Writes a user's file; returns what goes before `:factory`."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("form", ["{file}:build", "mine:build"])
def test_a_file_and_a_module_give_the_same_workload(folder: Path, fake: Any, form: str) -> None:
    """By path, or by name from the current folder."""
    workload = load_workload(form.format(file=write(folder, GOOD)))
    assert type(workload.model).__name__ == "Linear"
    assert workload.sample_batch[0].shape == (3, 4)
    assert workload.arguments == {"target_batch": 6}


def test_a_file_can_import_its_neighbours(folder: Path, fake: Any) -> None:
    """As it could when run with `python file.py`."""
    write(folder, GOOD, "project/parts_of_mine.py")
    file = write(folder, "from parts_of_mine import build", "project/train_mine.py")
    assert load_workload(f"{file}:build").arguments == {"target_batch": 6}


def test_a_file_with_dataclasses_and_a_relative_path(folder: Path, fake: Any) -> None:
    """The module can be found under its name while it is being imported."""
    write(
        folder,
        "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass C:\n    x: int\n" + GOOD,
    )
    assert load_workload("mine.py:build").arguments == {"target_batch": 6}


def test_the_command_line_wins_over_the_factory(folder: Path, fake: Any, run: Callable[..., Any]) -> None:
    """An option that was given replaces the factory's; what was not given stays."""
    text = GOOD.replace(
        '"target_batch": 6',
        '"target_batch": 6, "budget": "1GiB", "seed": 9, '
        '"space": __import__("autofit").SearchSpace(micro_batch_size=[2, 3], precision="float32")',
    )
    finished = run("--model", f"{write(folder, text)}:build", "--budget", "2GiB", "--precision", "bfloat16")
    assert finished.code == 0, finished.err
    expected = {"target_batch": 6, "budget": "2GiB", "seed": 9}
    assert expected.items() <= fake.call.items()
    assert fake.call["space"] == SearchSpace(micro_batch_size=[2, 3], precision="bfloat16")


def test_running_a_file_is_announced(folder: Path, fake: Any, run: Callable[..., Any]) -> None:
    """A person sees on stderr that their code is being run."""
    write(folder, GOOD)
    assert "autofit: running factory build from mine.py" in run("--model", "mine.py:build").err.splitlines()


@pytest.mark.parametrize(
    ("text", "factory", "said"),
    [
        (GOOD, "bild", "has no 'bild'. Did you mean 'build'? Functions there: build."),
        (GOOD + "thing = 3", "thing", "is a int, not a factory"),
        (GOOD + "thing = nn.Linear(1, 1)", "thing", "is a Linear, not a factory"),
        (GOOD + "def only(): return nn.Linear(1, 1)", "only", "returned only a model (Linear)"),
        (GOOD + "def none(): pass", "none", "returned a NoneType"),
        (GOOD + "def part(): return {'model': nn.Linear(1, 1)}", "part", "returned no sample_batch"),
        (GOOD + "def odd(): return {'model': 3, 'sample_batch': 4}", "odd", "returned a int as 'model'"),
        (GOOD + "def typo(): return {**build(), 'los_fn': 3}", "typo", "'los_fn', which is no argument of tune. Did"),
        (GOOD + "def raises(): return {}['key']", "raises", "failed: KeyError: 'key'"),
        (GOOD + "def needs(x): pass", "needs", "missing 1 required positional argument"),
        ("import no_such_package", "build", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("def build(:", "build", "SyntaxError"),
        ("import sys; sys.exit('usage: mine')", "build", "SystemExit: usage: mine"),
        ("x = 1 / 0", "build", "ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_wrong_with_a_factory_is_said(folder: Path, fake: Any, text: str, factory: str, said: str) -> None:
    """One sentence with the cause instead of a traceback through this package."""
    file = write(folder, text)
    with pytest.raises(ConfigError) as error:
        load_workload(f"{file}:{factory}")
    assert said in str(error.value)


def test_the_line_that_failed_is_named(folder: Path, fake: Any) -> None:
    """The file and line of the user's code, not of this package."""
    file = write(folder, "x = 1\ny = x / 0\n")
    with pytest.raises(ConfigError, match=r"mine\.py, line 2"):
        load_workload(f"{file}:build")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.py:build", "There is no file 'missing.py'"),
        ("no.such.module:build", "Models by name are timm:NAME and hf:NAME."),
    ],
)
def test_what_is_not_there_is_said(folder: Path, fake: Any, name: str, said: str) -> None:
    """A wrong path and a wrong module name."""
    with pytest.raises(ConfigError) as error:
        load_workload(name)
    assert said in str(error.value)


@pytest.mark.parametrize("option", ["image_size", "sequence_length"])
def test_sizes_do_not_apply_to_a_factory(folder: Path, fake: Any, option: str) -> None:
    """Its batch is its own, so the option would have no effect."""
    with pytest.raises(ConfigError, match="does not apply"):
        load_workload(f"{write(folder, GOOD)}:build", **{option: 32})
