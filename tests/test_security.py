"""Plans are data, from strangers too; secrets stay where they were passed; code runs only because it was asked to."""

from __future__ import annotations

import ast
import builtins
import json
import logging
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest

import autofit
from autofit.candidate import SearchSpace
from autofit.cli.models import load_workload
from autofit.errors import AutofitError, ConfigError, PlanMismatchError, StorageError
from autofit.plan import Plan
from autofit.report.text import report_text, trial_line
from autofit.search import search
from autofit.search.storage import storage_errors, without_password
from tests.models import Wide, vector_batch

GOLDEN = Path(__file__).parent / "report" / "golden" / "cpu.json"
PACKAGE = Path(autofit.__file__).parent
# A terminal's escape sequences, markup, HTML, and what would be code if it were pasted into some.
HOSTILE = '\x1b[2J\x1b]0;title\x07\x9b31m\u202e[bold red]<script>x</script>"""\nimport os\nos.system("boom")\n#\'\\'
_KEPT = ("precision", "mode", "outcome", "loss_weight", "given", "default_loss", "weighting")


def hostile(value: Any, key: str = "") -> Any:
    """Every text in a document that is free, replaced."""
    if isinstance(value, dict):
        return {name: hostile(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [hostile(inner, key) for inner in value]
    return HOSTILE if isinstance(value, str) and key not in _KEPT else value


def strangers_plan() -> Plan:
    """A plan that is valid and whose every name is an attack."""
    document = hostile(json.loads(GOLDEN.read_text(encoding="utf-8")))
    document["notes"] = [HOSTILE]
    for trial in document["trials"]:
        trial["message"] = HOSTILE
        trial["candidate"]["checkpointing"] = {"mode": "full", "blocks": [HOSTILE]}
    document["loss"] = {"batch_dims": {HOSTILE: 0}, "splits": {f"{HOSTILE}.x": 0}}
    return Plan.from_json(json.dumps(document))


def test_names_in_reports_are_escaped() -> None:
    """No character of a plan moves a terminal's cursor, changes its title or the direction of writing."""
    plan = strangers_plan()
    for text in (report_text(plan), *map(trial_line, plan.trials)):
        assert not set(text) & set("\x1b\x07\x9b\u202e")
    assert r"\x1b[2J" in report_text(plan)
    assert "[bold red]" in report_text(plan, width=400)  # shown, not obeyed


def test_recipes_quote_what_they_name() -> None:
    """Code that is printed from a plan holds its names as text and nothing else."""
    tree = ast.parse(strangers_plan().to_python())
    called = {node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "attr")}
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert "system" not in called
    assert imported == {"torch"}


def test_plans_are_data(tmp_path: Path) -> None:
    """A pickle is no plan and is never loaded; unknown fields, at any depth, and unknown versions are refused."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (builtins.exec, ("raise SystemExit('the pickle ran')",))

    path = tmp_path / "plan.json"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ConfigError, match="not valid"):
        Plan.load(path)
    for place in ("", "environment", "trials.0", "trials.0.candidate", "trials.0.candidate.checkpointing"):
        document = inner = json.loads(GOLDEN.read_text(encoding="utf-8"))
        for step in filter(None, place.split(".")):
            inner = inner[int(step) if step.isdigit() else step]
        inner["command"] = "rm"
        with pytest.raises(ConfigError, match="command"):
            Plan.from_json(json.dumps(document))
    for version in (0, 2, "1.0", None):
        document = json.loads(GOLDEN.read_text(encoding="utf-8")) | {"schema_version": version}
        with pytest.raises((PlanMismatchError, ConfigError)):
            Plan.from_json(json.dumps(document))


# What ranks of one process group say to each other, as torch.distributed's own objects travel: never a file's content.
BETWEEN_RANKS = {"distributed/team.py": {"pickle.loads"}}
_CODE = ("eval", "exec", "compile", "__import__")


def test_nothing_is_unpickled_or_evaluated() -> None:
    """Neither a file's pickle nor eval nor exec occur in the package, nor a shell."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                loads = called.startswith(("pickle.", "torch.load", "marshal.", "shelve.")) and "load" in called
                if called in _CODE or loads or called.startswith(("subprocess.", "os.system", "os.exec", "os.popen")):
                    found.setdefault(path.relative_to(PACKAGE).as_posix(), set()).add(called)
    assert found == BETWEEN_RANKS


URLS = [
    "postgresql://user:s3cret@db.example/study",
    "postgresql+nothing://user:s3cret@db.example/study",
    "mysql://user:s3cret@db.example:3306/study",
    "sqlite://user:s3cret@db.example/study",
    "user:s3cret@db.example",
    "redis://:s3cret@db.example",
    "postgresql://db.example/study?user=u&password=s3cret",
    "postgresql://user:s3cret@with@at@db.example/study",
]


@pytest.mark.parametrize("url", URLS)
def test_passwords_of_storages_are_not_told(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the error, nor what it was raised from, nor a log has it."""
    caplog.set_level(logging.DEBUG)
    with pytest.raises(AutofitError) as caught:
        search([autofit.Candidate(micro_batch_size=1, accumulation_steps=1)], lambda _: None, storage=url)  # type: ignore[arg-type,return-value]
    chain: list[BaseException] = [caught.value]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    assert not any("s3cret" in f"{error!s}{error!r}" for error in chain)
    assert "s3cret" not in "".join(traceback.format_exception_only(caught.value))
    assert "s3cret" not in caplog.text


def test_a_database_that_fails_later_does_not_tell_either() -> None:
    """An error text of the driver is censored on the way out."""
    with pytest.raises(StorageError, match=r"user:\*\*\*@db") as caught, storage_errors():
        raise OSError("could not connect to postgresql://user:s3cret@db.example/study")
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))[-2000:].rpartition("StorageError")[2]
    assert "s3cret" not in str(caught.value.__cause__)
    assert without_password("sqlite:///study.db") == "sqlite:///study.db"
    assert without_password("mail me@example.com") == "mail me@example.com"


def test_plans_do_not_name_their_storage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where trials are written down is nobody's business who reads the plan or the log."""
    caplog.set_level(logging.DEBUG, logger="autofit")
    plan = autofit.tune(
        Wide(),
        vector_batch(),
        target_batch=2,
        device="cpu",
        max_trials=1,
        space=SearchSpace(precision="float32", checkpointing="none"),
        storage=f"sqlite:///{tmp_path}/s3cret.db",
        study_name="study",
    )
    assert "s3cret" not in plan.to_json() + report_text(plan) + caplog.text


def test_code_runs_only_where_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file beside is not imported for a name that is none of a factory's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "resnet18.py").write_text("raise SystemExit('ran')")
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    for name in ("own", "own.py", "no_such_model"):
        with pytest.raises(ConfigError):
            load_workload(name)
