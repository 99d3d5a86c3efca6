"""Plans: what they hold, how the best trial is chosen, and JSON there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autofit.candidate import Candidate
from autofit.errors import ConfigError, PlanMismatchError
from autofit.plan import Environment, Plan, Seconds, Trial, best_trial

ENVIRONMENT = Environment(
    autofit_version="0.1.0",
    torch_version="2.14.1",
    python_version="3.11.7",
    platform="Linux",
    device="cpu",
    device_name="a CPU",
    device_total_bytes=1 << 34,
    memory_source="tracked",
    model="ResNet",
    parameters=10,
    trainable_parameters=10,
    optimizer="AdamW",
    seed=0,
)


def trial(number: int, rate: float | None = None, *, peak: int = 100, iqr: float = 0.0, **values: Any) -> Trial:
    """A trial of `rate` samples per second; feasible unless said otherwise."""
    seconds = Seconds(median=1.0, iqr=iqr, samples=(1.0,)) if rate else None
    candidate = Candidate(
        micro_batch_size=number + 1, accumulation_steps=1, precision=values.pop("precision", "float32")
    )
    return Trial(
        number=number,
        candidate=candidate,
        outcome=values.pop("outcome", "feasible"),
        peak_reserved_bytes=peak,
        step_seconds=seconds,
        samples_per_second=rate,
        **values,
    )


def plan(*trials: Trial, best: int | None = None) -> Plan:
    return Plan(
        target_batch=8,
        budget_bytes=1000,
        cap_bytes=900,
        best_number=best,
        trials=trials,
        environment=ENVIRONMENT,
        notes=("n",),
    )


@pytest.mark.parametrize(
    ("trials", "best"),
    [
        ([trial(0, 10.0), trial(1, 20.0)], 1),
        ([trial(0, 10.0), trial(1, 20.0, outcome="over_budget")], 0),
        ([trial(0, 100.0, peak=50), trial(1, 100.5, peak=80)], 0),
        ([trial(0, 100.0, peak=80, precision="bfloat16"), trial(1, 100.5, peak=80)], 1),
        ([trial(0, 90.0, peak=50), trial(1, 100.0, peak=80)], 1),
        ([trial(0, 97.0, peak=50, iqr=0.08), trial(1, 100.0, peak=80)], 0),
        ([trial(0, None), trial(1, None, outcome="out_of_memory")], None),
        ([], None),
    ],
    ids=["fastest", "feasible only", "tie: memory", "tie: exact", "no tie", "tie within noise", "unmeasured", "none"],
)
def test_best_trial(trials: list[Trial], best: int | None) -> None:
    """C20: samples per second decide; within the noise less memory does, then the more exact arithmetic."""
    found = best_trial(trials)
    assert (found.number if found else None) == best


@given(st.lists(st.floats(min_value=1e-6, max_value=1e3), min_size=1, max_size=20))
def test_seconds_keep_the_samples(samples: list[float]) -> None:
    """Median and quartiles lie inside the samples."""
    seconds = Seconds.of(samples)
    assert seconds.samples == tuple(samples)
    assert min(samples) <= seconds.median <= max(samples)
    assert 0 <= seconds.iqr <= max(samples) - min(samples) + 1e-12


def test_save_and_load(tmp_path: Path) -> None:
    """A plan reads back equal, is replaced whole, and leaves no other file behind."""
    path = tmp_path / "plan.json"
    path.write_text("old")
    made = plan(trial(0, 10.0), best=0)
    made.save(path)
    assert Plan.load(path) == made
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert json.loads(path.read_text())["trials"][0]["alloc_retries"] is None


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither half a plan nor a temporary file stays."""
    path = tmp_path / "plan.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        plan(trial(0, 10.0), best=0).save(path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_best_must_be_there() -> None:
    """A plan without a best trial says so; a best number that is no trial is refused, as are twice the same numbers."""
    with pytest.raises(ConfigError, match="nothing that was tried fits"):
        plan(trial(0, outcome="out_of_memory")).best
    with pytest.raises(ValidationError, match="best_number 3"):
        plan(trial(0, 1.0), best=3)
    with pytest.raises(ValidationError, match="same number"):
        plan(trial(0, 1.0), trial(0, 2.0))
    assert plan(trial(0, 1.0), trial(1, 2.0), best=1).candidate.micro_batch_size == 2


def test_another_schema_version_is_told_apart() -> None:
    """H6, H8: a plan of another version is a mismatch that names both versions."""
    document = json.loads(plan(trial(0, 1.0), best=0).to_json())
    document["schema_version"] = 99
    with pytest.raises(PlanMismatchError, match="schema version 99") as caught:
        Plan.from_json(json.dumps(document))
    assert caught.value.differences


@pytest.mark.parametrize("text", ["", "[]", "{}", "not json", '{"schema_version": 1}', b"\xff\xfe", '{"a": NaN}'])
def test_what_is_no_plan(text: str | bytes) -> None:
    """Anything else is a ConfigError, never a traceback of the parser."""
    with pytest.raises(ConfigError, match="The plan is not valid"):
        Plan.from_json(text)


def test_unknown_fields_are_refused() -> None:
    """A plan says nothing that this version does not understand."""
    document = json.loads(plan(trial(0, 1.0), best=0).to_json())
    document["command"] = "rm"
    with pytest.raises(ConfigError, match="command"):
        Plan.from_json(json.dumps(document))


def test_nan_is_refused() -> None:
    """What was not measured is None, never NaN."""
    with pytest.raises(ValidationError):
        Seconds(median=float("nan"), iqr=0.0, samples=(1.0,))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"cap_bytes": -1}, "cap_bytes"),
        ({"budget_bytes": -1}, "budget_bytes"),
        ({"cap_bytes": 99}, "above the cap"),
        ({"best_number": 1}, "out_of_memory"),
    ],
)
def test_what_cannot_be_is_not_read(change: dict[str, Any], complaint: str) -> None:
    """A plan that contradicts itself is none."""
    text = plan(trial(0, 10.0), trial(1, outcome="out_of_memory"), best=0).to_json()
    assert Plan.from_json(text).best_number == 0
    with pytest.raises(ConfigError, match=complaint):
        Plan.from_json(json.dumps(json.loads(text) | change))


@pytest.mark.parametrize("path", [5, None, "", "/", "no/such/plan.json"])
def test_what_is_no_file(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was passed stands in the error."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"takes the path of a file|no plan to read at"):
        Plan.load(path)
