"""The layers of the package: an import may only point downward."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "autofit"

# Module or folder -> layer. A module may import those of lower layers, and its own siblings within one folder.
LAYERS = {
    "_version": 0,
    "errors": 0,
    "kept_operators": 0,
    "units": 0.5,
    "candidate": 1,
    "insight": 1.2,
    "loss_facts": 1.2,
    "recipe_parts": 1.2,
    "recipe": 1.5,
    "plan": 2,
    "progress": 2,
    "device": 3,
    "flags": 3,
    "random_states": 3,
    "gpus": 3,
    "batch": 4,
    "loss": 4.5,
    "optimizers": 4.5,
    "interrupts": 4,
    "oom": 5,
    "timing": 5,
    "distributed": 5.2,
    "search": 5,
    "report": 5,
    "memory": 6,
    "step": 6,
    "attributes": 5.5,
    "snapshot": 6,
    "placement": 6.5,  # moves what a snapshot describes
    "predict": 7,
    "verdict": 7.5,  # what a trial says of itself
    "stepping": 7.8,
    "trial": 8,
    "exactness": 8.2,
    "finals": 8.5,
    "budget": 8.5,  # the parts of tune()
    "boundary": 8.5,
    "space": 8.5,
    "checks": 8.5,
    "environment": 8.5,
    "fingerprint": 8.5,
    "hindsight": 8.4,
    "foresight": 8.5,
    "leftovers": 8.5,
    "probe": 8.5,
    "fidelity": 8.5,
    "preparation": 8.8,
    "cache": 8.9,
    "tuner": 9,
    "preflight": 9,
    "forecaster": 9,
    "integrations": 10,
    "cli": 10,
    "__init__": 11,
    "__main__": 11,
}
# A plan hands out the step that it describes, its check, its pictures, and itself in another framework's words; these
# point upward, inside the methods that need them.
DOORS = {("plan", "step"), ("plan", "preflight"), ("plan", "integrations"), ("plan", "report")}
DATA_ONLY = ("report", "search")  # these know the data of layers 0 to 2 and nothing else


def unit_of(path: Path) -> str:
    """The module or folder directly below the package that a file belongs to."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path: Path) -> Iterator[str]:
    """The names that a file imports at run time, wherever in the file."""
    tree = ast.parse(path.read_text())
    typing_only: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            typing_only.update(inner for statement in node.body for inner in ast.walk(statement))
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path: Path) -> Iterator[str]:
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "autofit" and len(parts) > 1:
            yield parts[1] if parts[1] in LAYERS else "__init__"


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_unit_has_a_layer() -> None:
    """A new module or folder must be placed in the map."""
    assert {unit_of(path) for path in FILES} <= set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downward(path: Path) -> None:
    """No module knows of one above it or beside it."""
    unit = unit_of(path)
    for imported in own_imports(path):
        if imported == unit or (unit, imported) in DOORS:
            continue
        assert LAYERS[imported] < LAYERS[unit], f"{unit} imports {imported}"
        if unit in DATA_ONLY:
            assert LAYERS[imported] <= 2, f"{unit} imports {imported}, which is not data"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_torch_and_optuna_stay_where_they_belong(path: Path) -> None:
    """Layers 0 to 2 and the report import neither torch nor optuna; only search imports optuna."""
    unit = unit_of(path)
    roots = {name.split(".")[0] for name in imports(path)}
    if LAYERS[unit] <= 2 or unit in DATA_ONLY:
        assert not roots & {"torch", "torchvision"}
    if unit != "search":
        assert "optuna" not in roots


def test_importing_autofit_loads_nothing_heavy() -> None:
    """`import autofit` is free; its names load what they need when they are first used."""
    code = (
        "import sys, autofit; heavy = {'torch', 'optuna', 'pydantic', 'typer', 'rich'} & set(sys.modules); "
        "assert not heavy, heavy; autofit.Candidate; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_exported_names() -> None:
    """The public names, each of which can be had."""
    import autofit

    assert autofit.__all__ == [
        "tune",
        "forecast",
        "predict_memory",
        "TrainStep",
        "Plan",
        "Trial",
        "Candidate",
        "Checkpointing",
        "SearchSpace",
        "MemoryPrediction",
        "errors",
        "__version__",
    ]
    for name in autofit.__all__:
        assert getattr(autofit, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'tunes'"):
        autofit.tunes
