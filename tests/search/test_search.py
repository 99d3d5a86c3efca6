"""`search` as a caller sees it: what is tried, what comes back, and that it always ends."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Device, affine_bytes, affine_seconds, fitted, ran_out, space

from autofit.candidate import Candidate, Checkpointing
from autofit.errors import ConfigError
from autofit.plan import Trial, best_trial
from autofit.search import search
from autofit.units import GiB

ALL = space(precisions=("float32", "tf32", "bfloat16"), modes=("none", "full"))


def alike(one: Candidate, other: Candidate) -> bool:
    """Whether two candidates differ in nothing but the split."""
    return (one.precision, one.checkpointing) == (other.precision, other.checkpointing)


@pytest.mark.parametrize("predict", [None, affine_bytes])
@pytest.mark.parametrize("gib", [3, 5, 8, 16, 30, 100])
def test_finds_the_optimum_of_an_affine_device(gib, predict):
    """Where time and memory are affine, the answer is within 2 % of the exhaustive optimum, after few trials."""
    device = Device(cap_bytes=gib * GiB)
    trials = search(ALL, device.evaluate, cap_bytes=device.cap_bytes, predict=predict)
    best = best_trial(trials)
    assert best is not None
    assert affine_seconds(best.candidate) <= 1.02 * affine_seconds(device.fastest(ALL))
    assert len(device.calls) <= 12


def test_few_trials_where_everything_fits():
    """One trial per precision, one for the effect of the split, at most one more to make sure."""
    device = Device()
    search(ALL, device.evaluate, cap_bytes=device.cap_bytes)
    assert len(device.calls) <= 5


def test_few_trials_on_a_plateau():
    """Where the micro-batch has no effect on speed, neighbours are not tried one by one."""
    device = Device(seconds_of=lambda c: 1.0)
    search(space(precisions=("float32",)), device.evaluate)
    assert len(device.calls) <= 6


@pytest.mark.parametrize("max_trials", [1, 2, 3])
def test_answer_is_one_that_passed_when_trials_end(max_trials):
    """C1: with few trials the answer is still a candidate that was run and passed."""
    device = Device(cap_bytes=9 * GiB)
    trials = search(ALL, device.evaluate, cap_bytes=device.cap_bytes, max_trials=max_trials)
    assert len(device.calls) == max_trials
    best = best_trial(trials)
    assert best is None or (best.candidate in device.calls and affine_bytes(best.candidate) <= device.cap_bytes)


@pytest.mark.parametrize("rate", [None, 0.0])
def test_a_trial_without_speed_is_never_best(rate):
    """C2: a step that did nothing reports no rate or zero; it comes back as invalid, and never as the answer."""
    split = {c.micro_batch_size for c in ALL if c.micro_batch_size >= 100}

    def evaluate(candidate: Candidate) -> Trial:
        trial = fitted(candidate, seconds=affine_seconds(candidate))
        empty = candidate.micro_batch_size in split
        return trial.model_copy(update={"samples_per_second": rate}) if empty else trial

    trials = search(ALL, evaluate)
    best = best_trial(trials)
    assert best is not None
    assert best.samples_per_second
    assert all(t.outcome == "invalid" for t in trials if t.candidate.micro_batch_size in split)


def test_goes_down_when_the_first_is_too_large():
    """C4: the largest does not fit, so smaller ones are tried until one does."""
    device = Device(cap_bytes=int(2.2 * GiB))
    trials = search(space(), device.evaluate, cap_bytes=device.cap_bytes)
    assert trials[0].outcome == "out_of_memory"
    assert best_trial(trials) is not None


@pytest.mark.parametrize("batch", [1, 2, 7, 10, 64])
def test_never_beyond_the_space(batch):
    """C5, C6, C9: however much memory there is, only sizes up to the batch are tried, and the largest really is."""
    candidates = space(batch=batch)
    device = Device()
    search(candidates, device.evaluate)
    assert set(device.calls) <= set(candidates)
    assert max(c.micro_batch_size for c in device.calls) == batch
    assert len(device.calls) <= 6


def test_alternating_out_of_memory_ends():
    """C8: a device that runs out every second time, whatever the size, ends the search within its bound."""
    turns = itertools.count()

    def evaluate(candidate: Candidate) -> Trial:
        return ran_out(candidate) if next(turns) % 2 == 0 else fitted(candidate, seconds=affine_seconds(candidate))

    trials = search(ALL, evaluate, max_trials=30)
    assert len(trials) <= 30
    assert len({t.candidate for t in trials}) == len(trials)


def test_ends_in_time():
    """C8: no trial begins after the timeout."""

    def evaluate(candidate: Candidate) -> Trial:
        time.sleep(0.05)
        return ran_out(candidate)

    began = time.monotonic()
    trials = search(ALL, evaluate, timeout=0.12)
    assert time.monotonic() - began < 2
    assert 1 <= len(trials) <= 3
    assert len(search(ALL, evaluate, timeout=1e-9)) == 1  # over before the first, which begins all the same


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1), with_predict=st.booleans(), max_trials=st.integers(1, 40))
def test_chaos_ends_and_nothing_is_tried_twice(seed, share, with_predict, max_trials):
    """C8, C17: any outcomes in any order, any predictions: within the bound, inside the space, each at most once."""
    chance = random.Random(seed)
    calls: list[Candidate] = []

    def evaluate(candidate: Candidate) -> Trial:
        calls.append(candidate)
        if chance.random() < share:
            return ran_out(candidate, reached=chance.choice([None, 5 * GiB]))
        if chance.random() < 0.1:
            return Trial(number=0, candidate=candidate, outcome=chance.choice(["invalid", "unstable", "slower"]))
        peak = chance.choice([None, chance.randrange(12 * GiB)])
        return fitted(candidate, seconds=chance.uniform(0.5, 2), peak=peak)

    def predict(candidate: Candidate) -> int | None:
        return chance.choice([None, chance.randrange(20 * GiB), affine_bytes(candidate)])

    trials = search(
        ALL, evaluate, cap_bytes=10 * GiB, predict=predict if with_predict else None, max_trials=max_trials, seed=seed
    )
    assert len(calls) <= max_trials
    assert set(calls) <= set(ALL)
    assert len({t.candidate for t in trials}) == len(trials)


def test_a_search_without_bounds_is_bounded():
    """C8: without max_trials the number of trials is still bounded, even where each kind of candidate is new."""
    candidates = [
        Candidate(
            micro_batch_size=8,
            accumulation_steps=1,
            checkpointing=Checkpointing(mode="full", blocks=(f"block{number}",)),
        )
        for number in range(100)
    ]
    device = Device(seconds_of=lambda c: 1.0)
    search(candidates, device.evaluate)
    assert len(device.calls) == 64


@pytest.mark.parametrize("predict", [None, affine_bytes])
def test_nothing_fits(predict):
    """C10, C12: with a cap of 0 the search stops at micro-batch 1 with nothing feasible, after one try at least."""
    device = Device(cap_bytes=0)
    trials = search(ALL, device.evaluate, cap_bytes=0, predict=predict)
    assert best_trial(trials) is None
    assert min(c.micro_batch_size for c in device.calls) == 1
    assert len(device.calls) <= 12
    assert all(t.outcome in ("out_of_memory", "over_budget") for t in trials)


@pytest.mark.parametrize(
    "bytes_of",
    [
        pytest.param(lambda c: 3 * GiB if c.micro_batch_size <= 86 else 11 * GiB, id="flat"),
        pytest.param(lambda c: 6 * GiB - c.micro_batch_size if c.micro_batch_size <= 86 else 11 * GiB, id="falling"),
    ],
)
def test_peaks_that_do_not_grow(bytes_of):
    """C14: readings that do not grow with the batch lead to no answer that was not measured."""
    device = Device(cap_bytes=10 * GiB, bytes_of=bytes_of)
    trials = search(space(), device.evaluate, cap_bytes=device.cap_bytes)
    best = best_trial(trials)
    assert best is not None
    assert best.candidate in device.calls
    assert best.candidate.micro_batch_size == 86


@pytest.mark.parametrize("share", [0.5, 0.8, 1.0, 1.2, 3.0])
def test_never_returns_an_untested_one(share):
    """C15: memory that grows quadratically, and predictions that are wrong: what is feasible was run, as it is."""
    device = Device(cap_bytes=16 * GiB, bytes_of=lambda c: 2 * GiB + c.micro_batch_size**2 * 2**20)
    trials = search(ALL, device.evaluate, cap_bytes=device.cap_bytes, predict=lambda c: int(share * affine_bytes(c)))
    feasible = [t for t in trials if t.feasible]
    assert feasible
    assert all(t.candidate in device.calls and device.bytes_of(t.candidate) <= device.cap_bytes for t in feasible)


@settings(max_examples=60, deadline=None)
@given(
    base=st.floats(0, 8), slope=st.floats(0.001, 2), bend=st.floats(0, 0.01), share=st.sampled_from([None, 0.6, 1, 1.5])
)
def test_what_ran_out_rules_out_larger_micro_batches(base, slope, bend, share):
    """C16: after running out, no larger micro-batch of the same line is tried; running out is rare, not the rule."""

    def bytes_of(candidate: Candidate) -> int:
        size = candidate.micro_batch_size
        return int((base + slope * size + bend * size**2) * GiB) + affine_bytes(candidate)

    device = Device(cap_bytes=10 * GiB, bytes_of=bytes_of)
    predict = (lambda c: int(share * bytes_of(c))) if share else None
    trials = search(ALL, device.evaluate, cap_bytes=device.cap_bytes, predict=predict)
    failed: list[Candidate] = []
    for trial in trials:
        if trial.candidate not in device.calls:
            continue
        for earlier in failed:
            if alike(earlier, trial.candidate):
                assert trial.candidate.micro_batch_size < earlier.micro_batch_size
        if trial.outcome == "out_of_memory":
            failed.append(trial.candidate)
    assert len(failed) <= 12


def test_speed_is_judged_per_sample_not_per_step():
    """C20: where every candidate is one micro-step, the smallest takes the least time, and is not the answer."""
    candidates = [Candidate(micro_batch_size=size, accumulation_steps=1) for size in range(1, 65)]

    def evaluate(candidate: Candidate) -> Trial:
        size = candidate.micro_batch_size
        return fitted(candidate, seconds=0.1 + 0.01 * size, samples=size)

    best = best_trial(search(candidates, evaluate))
    assert best is not None
    assert best.candidate.micro_batch_size >= 60


def test_collapse_near_the_limit_is_measured():
    """H1: candidates above 95 % of the cap run three times slower; measured speed decides, not size."""

    def seconds_of(candidate: Candidate) -> float:
        crowded = affine_bytes(candidate) > 0.95 * 10 * GiB
        return affine_seconds(candidate) * (3 if crowded else 1)

    candidates = space(batch=160, precisions=("float32",))
    device = Device(cap_bytes=10 * GiB, seconds_of=seconds_of)
    crowded = [c for c in candidates if 0.95 * device.cap_bytes < affine_bytes(c) <= device.cap_bytes]
    assert crowded
    for predict in (None, affine_bytes):
        best = best_trial(search(candidates, device.evaluate, cap_bytes=device.cap_bytes, predict=predict))
        assert best is not None
        assert seconds_of(best.candidate) <= 1.03 * seconds_of(device.fastest(candidates))


def test_smaller_micro_batches_may_be_faster():
    """Where samples get slower once a micro-batch outgrows the caches, small ones are found, despite 5 % noise."""
    chance = random.Random(0)

    def seconds_of(candidate: Candidate) -> float:
        share = candidate.micro_batch_size / 40
        return candidate.accumulation_steps * (0.002 + candidate.micro_batch_size * 0.01 * (1 + share / (1 + share)))

    device = Device(seconds_of=lambda c: seconds_of(c) * chance.uniform(0.95, 1.05))
    best = best_trial(search(space(precisions=("float32",)), device.evaluate))
    optimum = min(map(seconds_of, space(precisions=("float32",))))
    assert best is not None
    assert seconds_of(best.candidate) <= 1.08 * optimum
    assert seconds_of(ALL[-1]) > 1.5 * optimum


@pytest.mark.parametrize("overhead", [0.0, 0.05, 0.5])
def test_recomputes_only_where_the_twin_does_not_fit(overhead):
    """Recomputing less is faster at the same split, so `full` is tried only above the limit of its twin."""
    device = Device(cap_bytes=4 * GiB, seconds_of=lambda c: affine_seconds(c) + c.accumulation_steps * overhead)
    search(ALL, device.evaluate, cap_bytes=device.cap_bytes, predict=affine_bytes)
    for candidate in device.calls:
        if candidate.checkpointing.mode == "full":
            twin = candidate.model_copy(update={"checkpointing": Checkpointing()})
            assert affine_bytes(twin) > device.cap_bytes
    assert {c.checkpointing.mode for c in device.calls} == {"none", "full"}


def test_recomputes_nothing_where_everything_fits():
    """With room for everything, no candidate that recomputes is tried."""
    device = Device()
    search(ALL, device.evaluate, cap_bytes=device.cap_bytes)
    assert {c.checkpointing.mode for c in device.calls} == {"none"}


def test_a_space_of_recomputation_only():
    """When the space allows nothing else, recomputation is searched like anything."""
    candidates = space(modes=("full",))
    device = Device(cap_bytes=5 * GiB)
    best = best_trial(search(candidates, device.evaluate, cap_bytes=device.cap_bytes))
    assert best is not None
    assert affine_seconds(best.candidate) <= 1.02 * affine_seconds(device.fastest(candidates))


def test_predicted_not_to_fit_is_recorded_and_not_run():
    """For each line, the smallest split that is predicted not to fit shows where memory ends."""
    device = Device(cap_bytes=9 * GiB)
    trials = search(space(), device.evaluate, cap_bytes=device.cap_bytes, predict=affine_bytes)
    recorded = [t for t in trials if t.outcome == "over_budget"]
    assert {t.candidate.precision for t in recorded} == {"float32", "bfloat16"}
    for trial in recorded:
        line = [c for c in space() if alike(c, trial.candidate) and affine_bytes(c) > device.cap_bytes]
        assert trial.candidate == min(line, key=lambda c: c.micro_batch_size)
        assert trial.candidate not in device.calls
        assert trial.predicted_peak_bytes == affine_bytes(trial.candidate)
        assert trial.message.startswith("predicted to need ")
        assert trial.message.endswith("; not run")


def test_nothing_is_recorded_where_everything_is_predicted_to_fit():
    """A plan of a device with room for all shows no limit, since there is none."""
    device = Device()
    trials = search(space(), device.evaluate, cap_bytes=device.cap_bytes, predict=affine_bytes)
    assert [t.candidate for t in trials] == device.calls


@pytest.mark.parametrize("share", [0.85, 0.9, 0.95])
def test_a_wrong_prediction_costs_few_failures(share):
    """Predictions that are too low by up to 15 % are corrected by the failures, not met one split after the other."""
    device = Device(cap_bytes=6 * GiB)
    trials = search(ALL, device.evaluate, cap_bytes=device.cap_bytes, predict=lambda c: int(share * affine_bytes(c)))
    best = best_trial(trials)
    assert best is not None
    assert affine_seconds(best.candidate) <= 1.03 * affine_seconds(device.fastest(ALL))
    failed = [t.candidate for t in trials if t.outcome == "out_of_memory"]
    assert 1 <= len(failed) <= 5
    recorded = [t.candidate for t in trials if t.outcome == "over_budget"]
    assert not [one for one in recorded for other in failed if alike(one, other)], "the failure shows the limit"


def test_a_prediction_that_is_too_high_is_corrected_by_what_fitted():
    """When everything is predicted not to fit, the least is run; its peak shows that more fits."""
    device = Device(cap_bytes=9 * GiB)
    trials = search(ALL, device.evaluate, cap_bytes=device.cap_bytes, predict=lambda c: 6 * affine_bytes(c))
    best = best_trial(trials)
    assert best is not None
    assert affine_seconds(best.candidate) <= 1.03 * affine_seconds(device.fastest(ALL))


def test_unknown_predictions_are_measured():
    """A predictor that answers None leaves the search to its measurements."""
    device = Device(cap_bytes=9 * GiB)
    trials = search(ALL, device.evaluate, cap_bytes=device.cap_bytes, predict=lambda c: None)
    without = Device(cap_bytes=9 * GiB)
    search(ALL, without.evaluate, cap_bytes=device.cap_bytes)
    assert device.calls == without.calls
    assert not [t for t in trials if t.outcome == "over_budget"]


def test_few_failures_without_a_predictor():
    """Peaks that were measured lead near the limit: at most 6 failures from tiny to ample memory."""
    for gib in (2.1, 3, 5, 8, 16, 30):
        device = Device(cap_bytes=int(gib * GiB))
        trials = search(ALL, device.evaluate, cap_bytes=device.cap_bytes)
        assert sum(t.outcome == "out_of_memory" for t in trials) <= 6


def test_a_peak_above_the_cap_is_over_budget():
    """A trial that raised nothing but held more than the cap is not feasible."""
    lenient = Device(bytes_of=affine_bytes)
    reported: list[Trial] = []
    trials = search(ALL, lenient.evaluate, cap_bytes=9 * GiB, on_trial=reported.append)
    assert trials == reported
    assert all(affine_bytes(t.candidate) <= 9 * GiB for t in trials if t.feasible)
    assert any(t.outcome == "over_budget" and t.peak_reserved_bytes for t in trials)


def test_a_line_that_cannot_run_is_given_up():
    """A precision that the model does not take is dropped after two invalid trials; the others are searched."""
    device = Device()

    def evaluate(candidate: Candidate) -> Trial:
        trial = device.evaluate(candidate)
        return trial.model_copy(update={"outcome": "invalid"}) if candidate.precision == "bfloat16" else trial

    best = best_trial(search(space(), evaluate))
    assert sum(c.precision == "bfloat16" for c in device.calls) == 2
    assert best is not None
    assert best.candidate.precision == "float32"


def test_the_same_seed_gives_the_same_search():
    """Deterministic for a given seed and device."""
    runs = [Device(cap_bytes=9 * GiB) for _ in range(2)]
    for device in runs:
        search(ALL, device.evaluate, cap_bytes=device.cap_bytes, seed=3)
    assert runs[0].calls == runs[1].calls


def test_numbers_and_order_are_the_study_s():
    """Trials come back, and are reported, in the order they were made, numbered from 0."""
    reported: list[Trial] = []
    device = Device(cap_bytes=9 * GiB)
    trials = search(ALL, device.evaluate, cap_bytes=device.cap_bytes, predict=affine_bytes, on_trial=reported.append)
    assert trials == reported
    assert [t.number for t in trials] == list(range(len(trials)))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"max_trials": 0}, "max_trials=0"),
        ({"max_trials": True}, "max_trials=True"),
        ({"max_trials": 2.5}, "max_trials=2.5"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": -1.0}, "timeout=-1.0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"cap_bytes": -1}, "cap_bytes=-1"),
        ({"storage": "no-such-thing"}, "no-such-thing"),
    ],
)
def test_arguments_that_cannot_be_meant(arguments, text):
    """Errors name the argument and what was passed."""
    with pytest.raises(ConfigError, match=text):
        search(ALL, Device().evaluate, **arguments)


def test_racing_finds_the_same():
    """What is dropped as slower still shows how speed depends on the split: the same trials, the same best."""

    def racing(device: Device):
        rates: list[float] = []

        def evaluate(candidate: Candidate) -> Trial:
            trial = device.evaluate(candidate)
            if not trial.samples_per_second:
                return trial
            rates.append(trial.samples_per_second)
            lost = trial.samples_per_second < max(rates) / 1.15
            return trial.model_copy(update={"outcome": "slower"}) if lost else trial

        return evaluate

    candidates = space(precisions=("float32", "tf32", "bfloat16"), modes=("none", "full"))
    plain, device = Device(cap_bytes=16 * GiB), Device(cap_bytes=16 * GiB)
    search(candidates, plain.evaluate, cap_bytes=plain.cap_bytes)
    trials = search(candidates, racing(device), cap_bytes=device.cap_bytes)
    assert device.calls == plain.calls
    assert "slower" in {trial.outcome for trial in trials}


def test_an_empty_space():
    """No candidates is a mistake of the caller, said so."""
    with pytest.raises(ConfigError, match="no candidates"):
        search([], Device().evaluate)


def test_a_hundred_thousand_candidates():
    """The search itself takes at most two seconds of a large space, trials aside."""
    candidates = [
        Candidate.model_construct(
            micro_batch_size=-(-12_500 // steps), accumulation_steps=steps, precision=precision, checkpointing=mode
        )
        for precision in ("float32", "tf32", "bfloat16", "float16")
        for mode in (Checkpointing(), Checkpointing(mode="full"))
        for steps in range(1, 12_501)
    ]
    device = Device(cap_bytes=16 * GiB)
    began = time.process_time()
    search(candidates, device.evaluate, cap_bytes=device.cap_bytes, predict=affine_bytes)
    assert len(candidates) == 100_000
    assert time.process_time() - began < 2


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("fitting", range(1, 5))
@pytest.mark.parametrize("sizes", [(2, 4, 8, 9), (8, 9, 10, 11), (1, 30, 31, 32)])
def test_finds_the_one_that_fits_without_predictions(sizes, fitting, known):
    """However the sizes lie, a split that fits is found, and the largest where larger ones are faster."""
    candidates = [Candidate(micro_batch_size=size, accumulation_steps=-(-64 // size)) for size in sizes]

    def evaluate(candidate):
        size = candidate.micro_batch_size
        return fitted(candidate, seconds=1 / size, peak=size) if size in sizes[:fitting] else ran_out(candidate)

    trials = search(candidates, evaluate, cap_bytes=sizes[fitting - 1] if known else None)
    best = best_trial(trials)
    assert best is not None
    assert best.candidate.micro_batch_size == sizes[fitting - 1]
