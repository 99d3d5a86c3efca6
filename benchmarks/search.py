"""How many trials a search needs, and how near to the best it ends, on simulated devices.

    python -m benchmarks.search [--seed N] [--quick] [--out FILE]

Every method meets the same scenarios (12 models × 4 GPUs × 4 budgets, and the same models on a CPU), with noise. Its
answer is held against the exhaustive optimum of the noiseless model, so all figures are ratios within the run.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import optuna

from autofit.candidate import Candidate
from autofit.finals import close_contenders
from autofit.plan import Trial, best_trial
from autofit.search import search
from autofit.verdict import hopeless_seconds
from benchmarks.results import add_out, write
from benchmarks.simulation import CPU, GPUS, Scenario, scenarios

BASELINE_TRIALS = 20

Method = Callable[[Scenario, int], Sequence[Trial]]


def autofit_predicting(scenario: Scenario, seed: int) -> Sequence[Trial]:
    """`search` with a predictor that is off by a few per cent, racing and finals as in `tune`."""
    evaluate = _racing(scenario)
    trials = search(scenario.space, evaluate, cap_bytes=scenario.cap_bytes, predict=scenario.predict, seed=seed)
    return _after_finals(scenario, trials)


def autofit_measuring(scenario: Scenario, seed: int) -> Sequence[Trial]:
    """The same without a predictor."""
    return _after_finals(scenario, search(scenario.space, _racing(scenario), cap_bytes=scenario.cap_bytes, seed=seed))


def _racing(scenario: Scenario) -> Callable[[Candidate], Trial]:
    """Evaluates; what is clearly slower than the best so far is `slower`."""
    seen: list[Trial] = []

    def evaluate(candidate: Candidate) -> Trial:
        trial = scenario.evaluate(candidate)
        limit = hopeless_seconds(best_trial(seen))
        if limit and trial.step_seconds and trial.step_seconds.median > limit:
            trial = trial.model_copy(update={"outcome": "slower"})
        seen.append(trial)
        return trial

    return evaluate


def _after_finals(scenario: Scenario, trials: Sequence[Trial]) -> Sequence[Trial]:
    """The trials with those too close to call measured in turn; others that are no answer any more are `slower`."""
    close = close_contenders(trials)
    if len(close) < 2:
        return trials
    again = {trial.number: scenario.in_turn(trial) for trial in close}
    return [again.get(t.number, t.model_copy(update={"outcome": "slower"}) if t.feasible else t) for t in trials]


def optuna_tpe(scenario: Scenario, seed: int) -> Sequence[Trial]:
    """As Optuna is used by default: each knob suggested to TPE, running out of memory told as a failure."""
    by_knobs: dict[tuple[int, str, str], Candidate] = {
        (c.micro_batch_size, c.precision, c.checkpointing.mode): c for c in scenario.space
    }
    sizes = sorted({size for size, _, _ in by_knobs})
    precisions = sorted({precision for _, precision, _ in by_knobs})
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    trials = []
    for _ in range(BASELINE_TRIALS):
        asked = study.ask()
        size = sizes[asked.suggest_int("size", 0, len(sizes) - 1)]
        precision = asked.suggest_categorical("precision", precisions)
        mode = asked.suggest_categorical("mode", ["none", "full"])
        trial = scenario.evaluate(by_knobs[size, precision, mode])
        study.tell(asked, trial.samples_per_second, state=None if trial.feasible else optuna.trial.TrialState.FAIL)
        trials.append(trial)
    return trials


def random_search(scenario: Scenario, seed: int) -> Sequence[Trial]:
    """Different candidates, drawn at random."""
    return [scenario.evaluate(c) for c in random.Random(seed).sample(scenario.space, BASELINE_TRIALS)]


def doubling_told(scenario: Scenario, seed: int) -> Sequence[Trial]:
    """The usual batch-size finder: double until out of memory. It is told the precision and mode of the optimum."""
    best = min((c for c in scenario.space if scenario.needs(c) <= scenario.cap_bytes), key=scenario.seconds)
    return _double(scenario, [c for c in scenario.space if _line(c) == _line(best)])


def doubling_plain(scenario: Scenario, seed: int) -> Sequence[Trial]:
    """The same as it is used: in float32, without checkpointing."""
    return _double(scenario, [c for c in scenario.space if _line(c) == ("float32", "none")])


def _double(scenario: Scenario, line: Sequence[Candidate]) -> Sequence[Trial]:
    trials: list[Trial] = []
    size = 1
    while size <= line[-1].micro_batch_size and (not trials or trials[-1].feasible):
        trials.append(scenario.evaluate(_largest_up_to(size, line)))
        size *= 2
    return trials


def _line(candidate: Candidate) -> tuple[str, str]:
    return candidate.precision, candidate.checkpointing.mode


def _largest_up_to(size: int, line: Sequence[Candidate]) -> Candidate:
    return max((c for c in line if c.micro_batch_size <= size), key=lambda c: c.micro_batch_size)


METHODS: dict[str, Method] = {
    "autofit, predicting": autofit_predicting,
    "autofit, measuring": autofit_measuring,
    f"Optuna TPE ({BASELINE_TRIALS})": optuna_tpe,
    f"random ({BASELINE_TRIALS})": random_search,
    "doubling, told the line": doubling_told,
    "doubling, float32": doubling_plain,
}

# What tune() does, and what it does where nothing can be predicted.
QUICK = ("autofit, predicting", "autofit, measuring")


@dataclass(frozen=True)
class Run:
    """One method on one scenario: seconds of its answer relative to the optimum's, and what that took.

    `tried_ratio` is that of the fastest candidate it tried: the answer may be another, since a difference inside the
    noise counts as a tie and goes to less memory.
    """

    scenario: str
    ratio: float
    tried_ratio: float
    trials: int
    out_of_memory: int
    duplicates: int


@dataclass(frozen=True)
class Score:
    """One method on all scenarios."""

    method: str
    scenarios: int
    within_2_percent: float
    within_3_percent: float
    within_5_percent: float
    tried_within_2_percent: float
    worst_ratio: float
    median_trials: float
    p95_trials: float
    mean_out_of_memory: float
    duplicates: int


def run(method: Method, scenario: Scenario, *, seed: int) -> Run:
    """A method's trials on one scenario, judged; those that were only recorded as predicted do not count."""
    trials = [trial for trial in method(scenario, seed) if trial.outcome != "over_budget"]
    best = best_trial(trials)
    optimum = scenario.best_seconds
    assert optimum is not None
    ran = [trial for trial in trials if trial.step_seconds]
    return Run(
        scenario=scenario.name,
        ratio=scenario.seconds(best.candidate) / optimum if best else float("inf"),
        tried_ratio=min((scenario.seconds(t.candidate) / optimum for t in ran), default=float("inf")),
        trials=len(trials),
        out_of_memory=sum(trial.outcome == "out_of_memory" for trial in trials),
        duplicates=len(trials) - len({trial.candidate for trial in trials}),
    )


def score(name: str, runs: Sequence[Run]) -> Score:
    """Statistics over scenarios."""
    trials = [run.trials for run in runs]
    return Score(
        method=name,
        scenarios=len(runs),
        within_2_percent=_share(run.ratio <= 1.02 for run in runs),
        within_3_percent=_share(run.ratio <= 1.03 for run in runs),
        within_5_percent=_share(run.ratio <= 1.05 for run in runs),
        tried_within_2_percent=_share(run.tried_ratio <= 1.02 for run in runs),
        worst_ratio=max(run.ratio for run in runs),
        median_trials=statistics.median(trials),
        p95_trials=statistics.quantiles(trials, n=20, method="inclusive")[-1],
        mean_out_of_memory=statistics.fmean(run.out_of_memory for run in runs),
        duplicates=sum(run.duplicates for run in runs),
    )


def _share(holds: Iterable[bool]) -> float:
    return statistics.fmean(holds)


def table(title: str, scores: Sequence[Score]) -> str:
    """Scores as text, a method a line.

    `≤ 2 %`: answers at most that much slower than the optimum; `tried`: the same of the fastest candidate tried;
    `worst`: the slowest answer relative to the optimum; `median`, `p95`: trials; `OOM`: per scenario.
    """
    lines = [f"{title}: {scores[0].scenarios} scenarios"]
    heads = {"≤ 2 %": 8, "≤ 3 %": 8, "≤ 5 %": 8, "tried": 8, "worst": 7, "median": 8, "p95": 7, "OOM": 7, "twice": 7}
    lines.append(" " * 24 + "".join(f"{head:>{width}}" for head, width in heads.items()))
    lines += [
        f"{s.method:24}{s.within_2_percent:8.1%}{s.within_3_percent:8.1%}{s.within_5_percent:8.1%}"
        f"{s.tried_within_2_percent:8.1%}{s.worst_ratio:7.2f}"
        f"{s.median_trials:8.1f}{s.p95_trials:7.1f}{s.mean_out_of_memory:7.2f}{s.duplicates:7d}"
        for s in scores
    ]
    return "\n".join(lines)


def main() -> None:
    """Runs all methods on all scenarios, prints the tables, writes the JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.search", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="only what tune() does, and only on the GPUs")
    add_out(parser)
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    rows: list[dict[str, object]] = []
    places = (("GPUs", GPUS),) if arguments.quick else (("GPUs", GPUS), ("CPU", (CPU,)))
    for title, devices in places:
        scores = []
        for name, method in METHODS.items():
            if arguments.quick and name not in QUICK:
                continue
            runs = [run(method, s, seed=arguments.seed) for s in scenarios(seed=arguments.seed, devices=devices)]
            scores.append(score(name, runs))
        print(table(title, scores), flush=True)
        rows += [{"devices": title, **asdict(s)} for s in scores]
    ours = next(row for row in rows if row["method"] == QUICK[0])
    figures = {
        f"{name}_share" if name.endswith("percent") else name: round(value, 4)
        for name, value in ours.items()
        if isinstance(value, (int, float))
    }
    write(arguments.out, figures=figures, rows=rows, seed=arguments.seed)


if __name__ == "__main__":
    main()
