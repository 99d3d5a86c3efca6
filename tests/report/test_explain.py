"""A plan in plain words: what is said follows from the plan's figures."""

from __future__ import annotations

import pytest

from autofit.insight import Insight
from autofit.report.explain import NO_PREDICTION, explain
from tests.report.plans import MIB, NAMES, load, seen, tied


def words(plan: object, title: str) -> str:
    """The lines of the section whose title begins so."""
    return "\n".join(
        "\n".join(section.lines)
        for section in explain(plan)  # type: ignore[arg-type]
        if section.title.startswith(title)
    )


def test_what_takes_the_memory() -> None:
    """The largest part comes first, with its share; the naive step is held against the cap."""
    text = words(seen(), "What takes the memory")
    assert "Most is in use in the forward pass, predicted: 53.0 MiB, of which 40.0 MiB (75%) of activations" in text
    assert "keeps 8.0 MiB of state" in text
    assert "would need 916.0 MiB, predicted: it does not fit into the budget of 400.0 MiB" in text


@pytest.mark.parametrize(("predicted_mib", "said"), [(79, False), (40, True), (120, True)])
def test_a_prediction_that_missed_is_not_trusted(predicted_mib: int, said: bool) -> None:
    """Where the measured peak of 80 MiB was predicted far off, the words say so."""
    plan = seen()
    best = plan.best.model_copy(update={"predicted_peak_bytes": predicted_mib * MIB})
    others = tuple(trial for trial in plan.trials if trial.number != best.number)
    text = words(plan.model_copy(update={"trials": (*others, best)}), "What takes")
    assert ("Beware: the prediction of this step is 50%" in text) is said


def test_techniques_are_held_against_the_best() -> None:
    """Bytes more or less, whether it fits, and the speed where it was measured."""
    text = words(seen(), "What each technique")
    assert (
        "Larger micro-batches, 32 × 1: 916.0 MiB needed, 860.0 MiB more, which does not fit; 4% slower (measured)"
        in text
    )
    assert "every block recomputed: 30.0 MiB needed, 26.0 MiB less; its speed was not measured." in text
    assert "Recomputing costs about 22% of a micro-step" in text
    assert "bfloat16 autocast: 40.0 MiB needed, 16.0 MiB less" in text
    assert "state is 15% of the peak. One that keeps half as much would save 4.0 MiB" in text


def test_why_it_won() -> None:
    """How many ran, how many fit, and what came next."""
    text = words(seen(), "Why this plan won")
    assert "Of 3 candidates that were run, 2 fit, and it is the fastest of those." in text
    assert "The next fastest, 32 × 1 float32 checkpointing none, has 621 samples/s (4% less) at 120.0 MiB." in text


def test_a_tie_is_not_called_the_fastest() -> None:
    """Where memory decided, the words say so."""
    text = words(tied(load("cpu")), "Why")
    assert "fastest of those" not in text
    assert "a tie goes to less memory" in text


def test_what_was_foreseen_is_not_said_to_have_run() -> None:
    """A trial that was written down as over budget without running does not count as run."""
    plan = load("cpu")
    foreseen = plan.trials[0].model_copy(
        update={
            "number": 9,
            "outcome": "over_budget",
            "peak_reserved_bytes": None,
            "samples_per_second": None,
            "predicted_peak_bytes": 500 * MIB,
        }
    )
    text = words(plan.model_copy(update={"trials": (*plan.trials, foreseen)}), "Why")
    assert "Of 3 candidates that were run" in text
    assert "needs 500.0 MiB, predicted" in text


def test_without_predictions_only_what_was_measured_is_said() -> None:
    """An old plan, or one of a model that cannot be predicted."""
    for insight in (None, Insight()):
        plan = load("cpu").model_copy(update={"insight": insight})
        assert NO_PREDICTION in words(plan, "What takes the memory")
        assert words(plan, "What each technique") == ""


def test_a_plan_without_a_best_trial_is_explained_too() -> None:
    """What was tried, and the least that was held."""
    text = words(load("nothing_fits"), "Why there is no plan")
    assert "None of 2 trials fits into the 60.0 MiB" in text


@pytest.mark.parametrize("name", NAMES)
def test_every_plan_is_explained(name: str) -> None:
    """Whatever a plan lacks, there are sections with lines, and each line is a sentence."""
    sections = explain(load(name))
    assert sections
    assert all(line.endswith(".") for section in sections for line in section.lines)
