"""A plan as text: the table of trials, the recipe, the memory, and how to train with it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from itertools import groupby

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autofit.candidate import Candidate, CheckpointingMode, Precision, balanced
from autofit.plan import Plan, Trial, best_trial
from autofit.units import format_bytes, format_seconds

PRECISIONS: Mapping[Precision, str] = {
    "float32": "in float32",
    "tf32": "in float32 with TF32 matrix products",
    "bfloat16": "in bfloat16 autocast",
    "float16": "in float16 autocast with a gradient scaler",
}
NOT_TRIED = ("predicted", "not_run")
BEST = "*"


def report(plan: Plan, *, plan_path: str | None = None) -> RenderableType:
    """The whole report; `plan_path` is where the plan was saved, for the snippet that trains with it."""
    parts: list[RenderableType] = [Text(headline(plan), style="bold"), "", TrialTable(plan)]
    parts += [Text(line, style="dim") for line in _legend(plan)]
    parts += ["", *map(Text, _findings(plan))]
    parts += [Text(f"Note: {note}") for note in plan.notes]
    if plan.best_number is not None:
        parts += ["", *_snippet(plan, plan_path)]
    return Group(*parts)


def report_text(plan: Plan, *, width: int = 80, plan_path: str | None = None) -> str:
    """The report as plain text of at most `width` columns, without colour or trailing spaces."""
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None, force_terminal=False, highlight=False, markup=False)
    console.print(report(plan, plan_path=plan_path))
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


class TrialTable:
    """The trials that ran, the best one marked: a table, or a paragraph for each where the console is too narrow."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        table = self._table()
        if Measurement.get(console, options.update(max_width=1000), table).maximum <= options.max_width:
            yield table
        else:
            yield from self._paragraphs()

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in ("#", "micro × steps", "precision", "checkpoint", "peak", "samples/s", "outcome"):
            table.add_column(heading, justify="right" if heading in ("#", "peak", "samples/s") else "left")
        for trial in _shown(self._plan):
            candidate = trial.candidate
            table.add_row(
                f"{self._mark(trial)}{trial.number}",
                f"{candidate.micro_batch_size} × {candidate.accumulation_steps}",
                candidate.precision,
                str(candidate.checkpointing),
                peak_in_words(trial) or "-",
                rate_in_words(trial) or "-",
                outcome_in_words(trial),
                style=self._style(trial),
            )
        return table

    def _paragraphs(self) -> Iterator[RenderableType]:
        for trial in _shown(self._plan):
            facts = (
                peak_in_words(trial),
                rate_in_words(trial) and f"{rate_in_words(trial)} samples/s",
                outcome_in_words(trial),
            )
            text = f"{self._mark(trial)}{trial.number}: {trial.candidate}: {', '.join(filter(None, facts))}"
            yield Text(text, style=self._style(trial))

    def _mark(self, trial: Trial) -> str:
        return f"{BEST} " if trial.number == self._plan.best_number else ""

    def _style(self, trial: Trial) -> str:
        if trial.number == self._plan.best_number:
            return "bold green"
        return "" if trial.feasible else "dim"


def trial_line(trial: Trial) -> str:
    """One trial as one line: number, split, precision, checkpointing, peak, speed, outcome."""
    candidate = trial.candidate
    split = f"{candidate.micro_batch_size} × {candidate.accumulation_steps}"
    rate = f"{rate_in_words(trial)} samples/s" if trial.samples_per_second else ""
    line = (
        f"{trial.number:>4}  {split:<9}  {candidate.precision:<8}  {candidate.checkpointing!s:<8}  "
        f"{peak_in_words(trial):>9}  {rate:>16}  {outcome_in_words(trial)}"
    )
    return f"{line}: {_reason(trial)}" if _reason(trial) else line


def recipe(plan: Plan) -> str:
    """What the best trial does, in one sentence, and how fast it was."""
    trial = plan.best
    candidate = trial.candidate
    samples = balanced(plan.target_batch, plan.world_size)[0]
    steps = candidate.accumulation_steps
    batch = f"the whole batch of {samples}" if steps == 1 else f"{steps} micro-batches of {_sizes(candidate, samples)}"
    ranks = f" on each of {plan.world_size} ranks" if plan.world_size > 1 else ""
    speed = f": {rate_in_words(trial)} samples/s" if trial.samples_per_second else ""
    step = f", {format_seconds(trial.step_seconds.median)} per optimizer step" if trial.step_seconds else ""
    return (
        f"Train with {batch} per optimizer step{ranks}, {PRECISIONS[candidate.precision]}, "
        f"{_checkpointing(candidate)}{speed}{step}."
    )


def headline(plan: Plan) -> str:
    """The model, where it was tuned, the batch and the optimizer, in one line."""
    environment = plan.environment
    where = environment.device
    if environment.device_name != environment.device:
        where = f"{environment.device} ({environment.device_name})"
    return f"{environment.model} on {where}: {plan.target_batch} samples per optimizer step, {environment.optimizer}"


def _shown(plan: Plan) -> list[Trial]:
    """The trials that ran; all of them where none did, or where the best is a forecast."""
    if plan.best_number is not None and plan.best.outcome == "predicted":
        return list(plan.trials)
    return [trial for trial in plan.trials if trial.outcome not in NOT_TRIED] or list(plan.trials)


def _legend(plan: Plan) -> Iterator[str]:
    shown = _shown(plan)
    if plan.best_number is not None:
        yield f"{BEST} best"
    if any(trial.peak_reserved_bytes is None and trial.predicted_peak_bytes is not None for trial in shown):
        yield "~ predicted, not measured"
    if len(shown) < len(plan.trials):
        yield f"{len(plan.trials) - len(shown)} more not tried"
    for reason, trials in groupby(shown, key=_reason):
        if reason:
            yield f"{', '.join(str(trial.number) for trial in trials)}: {reason}"


def _findings(plan: Plan) -> Iterator[str]:
    if plan.best_number is None:
        yield f"Nothing fits into {budget_in_words(plan)}."
    else:
        yield recipe(plan)
        yield from _steadiness(plan.best)
        yield from tie(plan)
        peak = plan.best.peak_reserved_bytes
        if peak is not None:
            yield f"Its peak is {format_bytes(peak)}, {percent(peak / plan.cap_bytes)} of {budget_in_words(plan)}."
    source = plan.environment.memory_source
    yield f"Memory was {source}." if source.startswith(("measured", "tracked", "predicted")) else f"Memory: {source}."


def _steadiness(trial: Trial) -> Iterator[str]:
    """How much the figure of the best trial is worth."""
    seconds = trial.step_seconds
    if seconds and len(seconds.samples) > 1 and seconds.median > 0:
        share = f"{seconds.iqr / seconds.median:.1%}"
        rounds = len(seconds.samples)
        yield f"That is the median of {rounds} measured rounds; their interquartile range is {share} of it."


def tie(plan: Plan) -> Iterator[str]:
    """Why the best trial is not the one with the highest figure, where it is not and no finals decided."""
    decided = best_trial(plan.trials)
    if decided is None or decided.number != plan.best_number:
        return
    rates = {t.number: t.samples_per_second for t in plan.trials if t.feasible and t.samples_per_second}
    own = rates.get(plan.best.number)
    fastest = max(rates, key=lambda number: rates[number], default=None)
    if own is not None and fastest is not None and rates[fastest] > own:
        yield (
            f"Trial {fastest} was {percent(rates[fastest] / own - 1)} faster, which is within the noise of the "
            "measurements: a tie, and a tie goes to less memory."
        )


def budget_in_words(plan: Plan) -> str:
    """What the trials had to fit into: `the budget of 8.0 GiB`."""
    if plan.cap_bytes == plan.budget_bytes:
        return f"the budget of {format_bytes(plan.budget_bytes)}"
    return (
        f"the {format_bytes(plan.cap_bytes)} that the budget of {format_bytes(plan.budget_bytes)} leaves to "
        "PyTorch's allocator"
    )


def _snippet(plan: Plan, plan_path: str | None) -> Iterator[RenderableType]:
    saved = "" if plan_path else ", saved with --out plan.json"
    shares = sorted(set(balanced(plan.target_batch, plan.world_size)))
    yield f"To train with it{saved} (train_step takes the same loss as tune):"
    code = (
        f"import autofit\n\nplan = autofit.Plan.load({json.dumps(plan_path or 'plan.json')})\n"
        "step = plan.train_step(model, optimizer)\n"
        f"for batch in loader:  # {' or '.join(map(str, shares))} samples each\n"
        "    result = step(batch)"
    )
    yield ""
    yield Padding(Text(code), (0, 0, 0, 4))


def _sizes(candidate: Candidate, samples: int) -> str:
    """`85 and 86 samples`, or `64 samples`."""
    distinct = sorted(set(balanced(samples, candidate.accumulation_steps)))
    return f"{' and '.join(map(str, distinct))} sample{'' if distinct == [1] else 's'}"


def _checkpointing(candidate: Candidate) -> str:
    checkpointing = candidate.checkpointing
    if checkpointing.mode == "none":
        return "without activation checkpointing"
    modes = list(checkpointing.modes.values())
    counts = {mode: modes.count(mode) for mode in dict.fromkeys(modes)} or {checkpointing.mode: 0}
    parts = [f"{_MODES[mode]}{_blocks(count)}" for mode, count in counts.items()]
    return f"with activation checkpointing {', '.join(parts)}"


_MODES: dict[CheckpointingMode, str] = {"none": "", "full": "", "selective": "selective ", "offload": "to the host "}


def _blocks(count: int) -> str:
    return {0: "of every block", 1: "of 1 block"}.get(count, f"of {count} blocks")


def peak_in_words(trial: Trial) -> str:
    """The peak as measured, or with a tilde as predicted; empty where neither is known."""
    if trial.peak_reserved_bytes is not None:
        return format_bytes(trial.peak_reserved_bytes)
    return f"~{format_bytes(trial.predicted_peak_bytes)}" if trial.predicted_peak_bytes is not None else ""


def rate_in_words(trial: Trial) -> str:
    """Samples per second, with a tilde if predicted; empty where not known."""
    rate = trial.samples_per_second
    if rate is None:
        return ""
    text = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    return f"~{text}" if trial.outcome == "predicted" else text


def percent(share: float) -> str:
    """A share for people; a small one is not said to be nothing."""
    return f"{share:.0%}" if share >= 0.01 else "under 1%"


def outcome_in_words(trial: Trial) -> str:
    """The outcome's name without underscores."""
    return trial.outcome.replace("_", " ")


def _reason(trial: Trial) -> str:
    """The first line of what went wrong, where the outcome's name does not say it."""
    return trial.message.strip().partition("\n")[0] if trial.outcome in ("invalid", "unstable") else ""
