"""Reports of plans, compared with golden text. AUTOFIT_UPDATE_GOLDEN=1 writes what is printed now."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.candidate import Candidate, Checkpointing
from autofit.plan import Trial
from autofit.report.text import recipe, report_text, trial_line
from tests.report.plans import GOLDEN, load, tied
from tests.report.plans import NAMES as PLANS


def trial(**values: object) -> Trial:
    """A trial of 86 × 6 with `values` on top."""
    candidate = Candidate(micro_batch_size=86, accumulation_steps=6)
    return Trial.model_validate({"number": 3, "candidate": candidate, "outcome": "feasible", **values})


@pytest.mark.parametrize("width", [80, 48])
@pytest.mark.parametrize("name", PLANS)
def test_report_is_the_golden_text(name: str, width: int) -> None:
    """Every hand-made plan prints as it did when a person last looked at it."""
    golden = GOLDEN / f"{name}_{width}.txt"
    text = report_text(load(name), width=width)
    if os.environ.get("AUTOFIT_UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


@given(width=st.integers(min_value=44, max_value=200), name=st.sampled_from(PLANS))
def test_report_never_exceeds_the_width(width: int, name: str) -> None:
    """No line is longer than the console that it is printed on."""
    assert max(map(len, report_text(load(name), width=width).splitlines())) <= width


@pytest.mark.parametrize("name", PLANS)
def test_table_fits_80_columns_even_with_long_figures(name: str) -> None:
    """At 80 columns the trials are a table, not paragraphs."""
    plan = load(name)
    long = plan.trials[0].model_copy(
        update={
            "number": 99,
            "outcome": "out_of_memory",
            "peak_reserved_bytes": 1023 * 2**20,
            "samples_per_second": 12345678.0,
            "candidate": Candidate(
                micro_batch_size=4096,
                accumulation_steps=16,
                precision="bfloat16",
                checkpointing=Checkpointing(mode="full", blocks=tuple(map(str, range(128)))),
            ),
        }
    )
    text = report_text(plan.model_copy(update={"trials": (*plan.trials, long)}))
    assert "99  4096 × 16      bfloat16   full(128)   1023.0 MiB  12,345,678  out of memory" in text


def test_only_the_best_trial_is_marked() -> None:
    """One row carries the mark, and it is the best trial's."""
    marked = [line for line in report_text(load("gpu")).splitlines() if line.startswith("* ")]
    assert len(marked) == 2
    assert marked[0].startswith("* 2  256 × 2")
    assert marked[1] == "* best"


def test_a_predicted_peak_is_never_shown_as_measured() -> None:
    """What was not measured carries a tilde, and the tilde is explained."""
    text = report_text(load("forecast"))
    assert "~13.0 GiB" in text
    assert "~ predicted, not measured" in text


def test_a_plan_without_a_best_trial_offers_nothing_to_train_with() -> None:
    """No recipe and no snippet when nothing fits."""
    text = report_text(load("nothing_fits"))
    assert "Nothing fits into the 60.0 MiB" in text
    assert "train_step" not in text


def test_the_snippet_loads_the_file_that_was_written() -> None:
    """With a saved plan the snippet names it; without one it says how to save it."""
    assert 'Plan.load("out/my plan.json")' in report_text(load("cpu"), plan_path="out/my plan.json")
    assert "saved with --out plan.json" in report_text(load("cpu"))


@pytest.mark.parametrize(("cap_bytes", "share"), [(80 * 2**20, "100%"), (2**30, "8%"), (2**40, "under 1%")])
def test_a_small_peak_is_not_said_to_be_nothing(cap_bytes: int, share: str) -> None:
    """A peak that rounds to 0 % of the budget is under 1 %."""
    plan = load("cpu").model_copy(update={"cap_bytes": cap_bytes, "budget_bytes": cap_bytes})
    assert f"Its peak is 80.0 MiB, {share} of the budget" in report_text(plan)


def test_a_tie_is_explained() -> None:
    """Where a trial with a higher figure is not the best one, the report says why; else it does not."""
    plan = load("cpu")
    assert "tie" not in report_text(plan)
    text = report_text(tied(plan))
    assert "Trial 0 was under 1% faster, which is within the noise" in text


def test_text_in_a_plan_is_not_markup() -> None:
    """Square brackets in a note or a model's name come out as they are."""
    plan = load("cpu")
    plan = plan.model_copy(update={"notes": ("blocks [bold]layers[/bold] [0]",)})
    assert "Note: blocks [bold]layers[/bold] [0]" in report_text(plan)


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        ({"micro_batch_size": 32, "accumulation_steps": 1}, "the whole batch of 32 per optimizer step, in float32"),
        ({"micro_batch_size": 1, "accumulation_steps": 32}, "32 micro-batches of 1 sample per optimizer step"),
        ({"micro_batch_size": 11, "accumulation_steps": 3}, "3 micro-batches of 10 and 11 samples per"),
        (
            {"micro_batch_size": 32, "accumulation_steps": 1, "precision": "tf32"},
            "in float32 with TF32 matrix products, without activation checkpointing",
        ),
        (
            {"micro_batch_size": 32, "accumulation_steps": 1, "checkpointing": {"mode": "full"}},
            "with activation checkpointing of every block",
        ),
        (
            {"micro_batch_size": 32, "accumulation_steps": 1, "checkpointing": {"mode": "full", "blocks": ["a"]}},
            "with activation checkpointing of 1 block",
        ),
    ],
)
def test_recipe_says_what_the_candidate_does(candidate: dict[str, object], expected: str) -> None:
    """Split, precision and checkpointing in words."""
    plan = load("cpu")
    best = plan.best.model_copy(update={"candidate": Candidate.model_validate(candidate)})
    others = tuple(t for t in plan.trials if t.number != best.number)
    assert expected in recipe(plan.model_copy(update={"trials": (*others, best)}))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"peak_reserved_bytes": 5 * 2**30, "samples_per_second": 1234.4},
            "   3  86 × 6     float32   none        5.0 GiB   1,234 samples/s  feasible",
        ),
        (
            {"samples_per_second": 1.239},
            "   3  86 × 6     float32   none                   1.24 samples/s  feasible",
        ),
        (
            {"outcome": "out_of_memory", "predicted_peak_bytes": 2**30, "message": "in backward"},
            "   3  86 × 6     float32   none       ~1.0 GiB                    out of memory",
        ),
        (
            {"outcome": "invalid", "message": "Expected more than 1 value\nTraceback …"},
            "   3  86 × 6     float32   none                                   invalid: Expected more than 1 value",
        ),
    ],
)
def test_trial_line_is_one_line_in_fixed_columns(values: dict[str, object], expected: str) -> None:
    """Progress lines stand below one another."""
    assert trial_line(trial(**values)) == expected


def test_shares_that_differ_between_ranks_are_said() -> None:
    """32 samples on 3 ranks are 11, 11 and 10."""
    text = report_text(load("cpu").model_copy(update={"world_size": 3}))
    assert "for batch in loader:  # 10 or 11 samples each" in text
