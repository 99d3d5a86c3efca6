"""A plan as one HTML page that needs nothing else: no network, no script, readable as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources

from jinja2 import Environment as Templates
from jinja2 import StrictUndefined, Template
from markupsafe import Markup

from autofit.errors import ConfigError
from autofit.insight import Insight, StepMemory
from autofit.plan import Plan, Trial
from autofit.report.explain import PARTS, explain
from autofit.report.figure import Figure
from autofit.report.figures import both_peaks, figures
from autofit.report.svg import outline, printable, svg
from autofit.report.text import headline, outcome_in_words, peak_in_words, percent, rate_in_words
from autofit.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Table:
    """Text cells; the first of a row names it. `best` is the row that stands out, `messages` stand below."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: int | None = None
    messages: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Picture:
    """A figure, painted, and the same as a table."""

    figure: Figure
    svg: Markup
    table: Table | None


def html_report(plan: Plan) -> str:
    """The report of a plan as one HTML document. All text of the plan is escaped."""
    best = plan.best if plan.best_number is not None else None
    tables = {"tradeoff": _trials(plan), "memory-best": _parts(plan), "time": _times(plan), "blocks": _blocks(plan)}
    tables["accuracy"] = _accuracy(plan)
    return _template().render(
        plan=plan,
        best=best,
        headline=headline(plan),
        facts=tuple(_facts(plan, best)),
        share=_share(plan, best),
        pictures=[Picture(figure, Markup(svg(figure)), tables.get(figure.name)) for figure in figures(plan)],
        trials=_trials(plan),
        sections=explain(plan),
        recipe=_recipe(plan),
        environment=tuple(_environment(plan)),
        outline=outline,
    )


@cache
def _template() -> Template:
    """The page's template; what no page may contain is left out of every text."""
    source = resources.files("autofit.report").joinpath("page.html").read_text(encoding="utf-8")
    templates = Templates(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    return templates.from_string(source)


def _facts(plan: Plan, best: Trial | None) -> Iterator[tuple[str, str]]:
    """What a reader wants to know first, as (figure, what it is)."""
    if best is None:
        yield "nothing fits", f"of {len(plan.trials)} trials"
    else:
        if best.samples_per_second:
            yield rate_in_words(best), "samples per second"
        if best.step_seconds:
            yield format_seconds(best.step_seconds.median), "per optimizer step"
        yield f"{best.candidate.micro_batch_size} × {best.candidate.accumulation_steps}", "micro-batch × steps"
        yield peak_in_words(best) or "unknown", "peak memory"
    yield format_bytes(plan.budget_bytes), "budget"


def _share(plan: Plan, best: Trial | None) -> float | None:
    """The peak as a share of the cap, from 0 to 1."""
    peak = None if best is None else best.peak_reserved_bytes or best.predicted_peak_bytes
    return None if peak is None or not plan.cap_bytes else min(peak / plan.cap_bytes, 1.0)


def _recipe(plan: Plan) -> str:
    if plan.best_number is None:
        return ""
    try:
        return plan.to_python()
    except ConfigError as error:
        return f"# {error}"


def _trials(plan: Plan) -> Table:
    rows = [
        (
            str(trial.number),
            f"{trial.candidate.micro_batch_size} × {trial.candidate.accumulation_steps}",
            trial.candidate.precision,
            str(trial.candidate.checkpointing),
            peak_in_words(trial) or "–",
            rate_in_words(trial) or "–",
            format_seconds(trial.step_seconds.median) if trial.step_seconds else "–",
            outcome_in_words(trial),
        )
        for trial in plan.trials
    ]
    numbers = [trial.number for trial in plan.trials]
    head = ("#", "micro × steps", "precision", "checkpointing", "peak", "samples/s", "step", "outcome")
    best = numbers.index(plan.best_number) if plan.best_number is not None else None
    return Table("Every trial. ~ is predicted, not measured.", head, tuple(rows), best, tuple(_messages(plan)))


def _messages(plan: Plan) -> Iterator[tuple[str, str]]:
    """What trials said, as (trials, message); of forecasts the table says it all."""
    said: dict[str, list[str]] = {}
    for trial in plan.trials:
        if trial.message and trial.outcome != "predicted":
            said.setdefault(trial.message.partition("\n")[0], []).append(str(trial.number))
    for message, numbers in said.items():
        yield ", ".join(numbers), message


def _parts(plan: Plan) -> Table | None:
    seen = plan.insight or Insight()
    steps = [(name, step) for name, step in (("best plan", seen.best), ("naive step", seen.naive)) if step is not None]
    rows = [(words, *(_share_of(step, part) for _, step in steps)) for part, words in PARTS.items()]
    rows += [
        ("in use at the peak", *(format_bytes(step.peak_bytes) for _, step in steps)),
        ("peak is in", *(step.peak_phase() for _, step in steps)),
        ("needed of the allocator", *(format_bytes(step.needed_bytes) for _, step in steps)),
    ]
    return Table("What is in use at the peak, predicted.", ("", *(name for name, _ in steps)), tuple(rows))


def _share_of(step: StepMemory, part: str) -> str:
    nbytes = step.at_peak()[part]
    return f"{format_bytes(nbytes)} ({percent(nbytes / step.peak_bytes)})" if nbytes else "0 B"


def _times(plan: Plan) -> Table:
    rows = []
    for trial in plan.trials:
        if trial.step_seconds and trial.micro_step_seconds:
            seconds = trial.step_seconds
            rows.append(
                (
                    f"{trial.number}: {trial.candidate}",
                    format_seconds(trial.micro_step_seconds),
                    format_seconds(trial.optimizer_seconds or 0.0),
                    format_seconds(seconds.median),
                    percent(seconds.iqr / seconds.median) if seconds.iqr and seconds.median else "–",
                )
            )
    head = ("trial", "one micro-step", "optimizer", "whole step", "interquartile range")
    return Table("Medians of the measured rounds.", head, tuple(rows))


def _accuracy(plan: Plan) -> Table:
    rows = [
        (
            f"{trial.number}: {trial.candidate}",
            format_bytes(both[0]),
            format_bytes(both[1]),
            f"{both[0] / both[1] - 1:+.1%}",
        )
        for trial in plan.trials
        if (both := both_peaks(trial))
    ]
    return Table("Trials that ran.", ("trial", "predicted", "measured", "difference"), tuple(rows))


def _blocks(plan: Plan) -> Table:
    effects = (plan.insight or Insight()).blocks
    rows = [
        (effect.name, effect.mode, format_bytes(effect.saves_bytes), percent(effect.costs_share)) for effect in effects
    ]
    head = ("block", "in the plan", "lower peak if recomputed alone", "longer micro-step")
    return Table("Every block, predicted.", head, tuple(rows))


def _environment(plan: Plan) -> Iterator[tuple[str, str]]:
    for name, value in plan.environment:
        if value is not None:
            text = f"{value:,}" if name.endswith("parameters") else str(value)
            yield name.replace("_", " "), format_bytes(value) if name.endswith("_bytes") else text
