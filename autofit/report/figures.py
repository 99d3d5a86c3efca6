"""The pictures of a plan: what the report shows and `plan.plot` paints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autofit.insight import BlockEffect, StepMemory, StepPhase
from autofit.plan import Plan, Trial
from autofit.report.figure import Area, Axis, Bar, Figure, Line, Mark, Role, Shape, Span, bytes_axis, number_axis
from autofit.report.front import Point, pareto_front, points
from autofit.report.text import budget_in_words, outcome_in_words, percent, rate_in_words
from autofit.units import format_bytes, format_seconds

# Beyond so many times the budget a trial stands at the edge: it must not press the others together.
FARTHEST = 1.6
# More rows than this are unreadable; the table has them all.
MOST_ROWS = 12
SHORT: Mapping[StepPhase, str] = {"forward": "fwd", "backward": "bwd", "optimizer": "opt"}
LABELS: Mapping[Role, str] = {
    "weights": "weights and buffers",
    "optimizer_states": "optimizer states",
    "gradients": "gradients",
    "inputs": "inputs",
    "activations": "activations",
    "temporary": "temporary",
}


def figures(plan: Plan) -> tuple[Figure, ...]:
    """Every picture that the plan has the figures for, in the order of the report."""
    return tuple(_figures(plan))


def _figures(plan: Plan) -> Iterator[Figure]:
    if any(trial.known_peak_bytes is not None for trial in plan.trials):
        yield tradeoff(plan)
    seen = plan.insight
    if seen is not None and seen.best is not None:
        yield memory_over_step(seen.best, plan, name="memory-best", title="Memory over one step of the best plan")
    if seen is not None and seen.naive is not None:
        yield memory_over_step(seen.naive, plan, name="memory-naive", title="Memory over one naive step")
    if any(trial.step_seconds and trial.micro_step_seconds for trial in plan.trials):
        yield time_per_step(plan)
    if any(both_peaks(trial) for trial in plan.trials):
        yield predicted_against_measured(plan)
    if seen is not None and seen.blocks:
        yield blocks(seen.blocks)


def tradeoff(plan: Plan) -> Figure:
    """Throughput against peak memory, with the Pareto front and the budget; what has no speed stands on the floor."""
    known = points(plan)
    front = pareto_front(known)
    edge = FARTHEST * max([plan.cap_bytes, *(p.peak_bytes for p in front)])
    without = [t for t in plan.trials if not t.samples_per_second and t.known_peak_bytes is not None]
    peaks = [min(peak, edge) for t in plan.trials if (peak := t.known_peak_bytes) is not None]
    rated = [_point_mark(plan, point, edge) for point in known]
    on_the_floor = [_floor_mark(t, edge) for t in without]
    unbeaten = f"Of {len(known)} with a speed {len(front)} lie on the front: none is both faster and smaller than those"
    y = number_axis("samples per second", [point.rate for point in known] or [1.0])
    return Figure(
        name="tradeoff",
        title="Speed against memory",
        description=f"Every trial by its peak memory and its samples per second. {unbeaten}. The vertical "
        f"line is {budget_in_words(plan)}. "
        + ("Crosses on the floor have no speed: they did not fit, or did not run." if on_the_floor else ""),
        x=bytes_axis("peak memory", [*peaks, plan.cap_bytes]),
        y=y,
        lines=(
            Line(_stairs(front), "front", label=""),
            Line(((plan.cap_bytes, y.low), (plan.cap_bytes, y.high)), "limit", dashed=True, label="budget"),
        ),
        marks=(*on_the_floor, *sorted(rated, key=lambda mark: mark.role == "best")),
        legend=tuple(_tradeoff_legend(plan, known, on_the_floor)),
    )


def _point_mark(plan: Plan, point: Point, edge: float) -> Mark:
    trial = point.trial
    role: Role = "feasible" if trial.feasible else "predicted" if trial.outcome == "predicted" else "failed"
    shape: Shape = "dot" if trial.feasible else "ring" if trial.outcome == "predicted" else "cross"
    if trial.number == plan.best_number:
        role, shape = "best", "star"
    says = f"{trial.number}: {trial.candidate}: {format_bytes(point.peak_bytes)}, {rate_in_words(trial)} samples/s"
    label = _split(trial) if trial.number == plan.best_number else ""
    return Mark(min(point.peak_bytes, edge), point.rate, role, shape, f"{says}, {outcome_in_words(trial)}", label)


def _floor_mark(trial: Trial, edge: float) -> Mark:
    peak = trial.known_peak_bytes or 0
    kind = "" if trial.peak_reserved_bytes is not None else "predicted "
    says = f"{trial.number}: {trial.candidate}: {kind}{format_bytes(peak)}, {outcome_in_words(trial)}"
    beyond = f"{format_bytes(peak)} →" if peak > edge else ""
    return Mark(min(peak, edge), 0.0, "failed", "cross", says, beyond)


def _tradeoff_legend(
    plan: Plan, known: Sequence[Point], on_the_floor: Sequence[Mark]
) -> Iterator[tuple[Role, Shape, str]]:
    if plan.best_number is not None:
        yield "best", "star", "best"
    if any(point.trial.feasible and point.trial.number != plan.best_number for point in known):
        yield "feasible", "dot", "fits"
    if any(point.trial.outcome == "predicted" and point.trial.number != plan.best_number for point in known):
        yield "predicted", "ring", "predicted to fit"
    if on_the_floor or any(point.trial.outcome not in ("feasible", "predicted") for point in known):
        yield "failed", "cross", "does not fit, or was dropped"
    yield "front", "line", "Pareto front"  # type: ignore[misc]
    yield "limit", "dashes", "budget"  # type: ignore[misc]


def _stairs(front: Sequence[Point]) -> tuple[tuple[float, float], ...]:
    """The front as a staircase: with less than a point's memory only the speed of the one before can be had."""
    stairs: list[tuple[float, float]] = []
    for point in front:
        if stairs:
            stairs.append((point.peak_bytes, stairs[-1][1]))
        stairs.append((point.peak_bytes, point.rate))
    return tuple(stairs)


def memory_over_step(step: StepMemory, plan: Plan, *, name: str, title: str) -> Figure:
    """Bytes in use, stacked by what they are for, with the phases and the cap."""
    series, totals = step.parts.series(), step.parts.totals()
    lower = [0] * len(totals)
    areas = []
    for part, values in series.items():
        upper = [low + value for low, value in zip(lower, values, strict=True)]
        if any(values):
            edges = tuple(zip(map(float, range(len(totals))), map(float, lower), map(float, upper), strict=True))
            areas.append(Area(edges, _part(part), f"{LABELS[_part(part)]}: at most {format_bytes(max(values))}"))
        lower = upper
    ends = [*(start.at for start in step.phases[1:]), len(totals) - 1]
    spans = tuple(
        Span(start.at, end, start.phase, SHORT[start.phase]) for start, end in zip(step.phases, ends, strict=True)
    )
    shows_cap = plan.cap_bytes <= 4 * step.peak_bytes
    fits = "fits into" if step.needed_bytes <= plan.cap_bytes else "does not fit into"
    last = max(len(totals) - 1.0, 1.0)
    return Figure(
        name=name,
        title=title,
        description=f"{step.candidate}, predicted. At most {format_bytes(step.peak_bytes)} are in use, in "
        f"{'the optimizer step' if step.peak_phase() == 'optimizer' else f'the {step.peak_phase()} pass'}; the step "
        f"needs {format_bytes(step.needed_bytes)} of the allocator and {fits} {budget_in_words(plan)}.",
        x=Axis("one optimizer step, by its allocations", 0.0, last),
        y=bytes_axis("memory in use", [*totals, *([plan.cap_bytes] if shows_cap else [])]),
        areas=tuple(areas),
        spans=spans,
        lines=(Line(((0.0, plan.cap_bytes), (last, plan.cap_bytes)), "limit", True, "budget"),) if shows_cap else (),
        legend=tuple((area.role, "area", LABELS[area.role]) for area in areas),
    )


def time_per_step(plan: Plan) -> Figure:
    """Seconds of one optimizer step: micro-steps and optimizer, the fastest trials first."""
    timed = [t for t in plan.trials if t.step_seconds and t.micro_step_seconds and t.samples_per_second]
    shown = sorted(timed, key=lambda t: (t.number != plan.best_number, -(t.samples_per_second or 0)))[:MOST_ROWS]
    bars = []
    for row, trial in enumerate(shown):
        assert trial.step_seconds
        total = trial.step_seconds.median
        optimizer = min(trial.optimizer_seconds or 0.0, total)
        steps, name = trial.candidate.accumulation_steps, f"{trial.number}: {trial.candidate}"
        share = percent(optimizer / total) if total else "none"
        bars += [
            Bar(row, 0.0, total - optimizer, "micro_step", f"{name}: {steps} × forward and backward"),
            Bar(row, total - optimizer, total, "optimizer", f"{name}: optimizer step, {share}"),
        ]
    best = shown[0]
    assert best.step_seconds
    steps = best.candidate.accumulation_steps
    return Figure(
        name="time",
        title="Where the time goes",
        description=f"Seconds of one optimizer step of {plan.target_batch} samples, measured. "
        f"{'The best plan' if best.number == plan.best_number else f'Trial {best.number}'} takes "
        f"{format_seconds(best.step_seconds.median)}: {steps} × {format_seconds(best.micro_step_seconds or 0)} for "
        f"forward and backward and {format_seconds(best.optimizer_seconds or 0)} for the optimizer.",
        x=number_axis("seconds per optimizer step", [bar.end for bar in bars]),
        y=Axis("", 0, len(shown)),
        rows=tuple(_row(plan, trial) for trial in shown),
        bars=tuple(bars),
        legend=(("micro_step", "area", "forward and backward"), ("optimizer", "area", "optimizer step")),
    )


def predicted_against_measured(plan: Plan) -> Figure:
    """Peaks of the trials that ran, as predicted and as measured; on the diagonal both agree."""
    pairs = [(trial, *both) for trial in plan.trials if (both := both_peaks(trial))]
    errors = [predicted / measured - 1 for _, predicted, measured in pairs]
    values = [value for _, *both in pairs for value in both]
    x = bytes_axis("predicted peak", values, from_zero=min(values) < max(values) / 2)
    y = bytes_axis("measured peak", values, from_zero=min(values) < max(values) / 2)
    worst = max(map(abs, errors))
    return Figure(
        name="accuracy",
        title="Predicted against measured",
        description=f"The predicted and the measured peak of {len(pairs)} trials; on the line both agree. The largest "
        f"difference is {worst:.1%} of what was measured.",
        x=x,
        y=y,
        lines=(Line(((x.low, x.low), (x.high, x.high)), "guide", True, "equal"),),
        marks=tuple(
            Mark(
                float(predicted),
                float(measured),
                "best" if trial.number == plan.best_number else "feasible" if trial.feasible else "failed",
                "star" if trial.number == plan.best_number else "dot" if trial.feasible else "cross",
                f"{trial.number}: {trial.candidate}: predicted {format_bytes(predicted)}, "
                f"measured {format_bytes(measured)}",
            )
            for trial, predicted, measured in sorted(pairs, key=lambda pair: pair[0].number == plan.best_number)
        ),
        legend=(
            ("best", "star", "best"),
            ("feasible", "dot", "fits"),
            ("failed", "cross", "was dropped"),
            ("guide", "dashes", "equal"),
        ),
    )


def blocks(effects: Sequence[BlockEffect]) -> Figure:
    """What recomputing each block alone would save; those that save most first."""
    shown = sorted(effects, key=lambda effect: -effect.saves_bytes)[:MOST_ROWS]
    rest = f" The {MOST_ROWS} that save most of {len(effects)}." if len(effects) > MOST_ROWS else ""
    values = [max(effect.saves_bytes, 0) for effect in shown]
    return Figure(
        name="blocks",
        title="Blocks: what recomputing one alone would save",
        description="How much lower the whole step's peak would be, predicted, at the best plan's micro-batch, if this "
        f"block alone were recomputed and no other.{rest}",
        x=bytes_axis("lower peak", [*values, 1]),
        y=Axis("", 0, len(shown)),
        rows=tuple(f"{effect.name}{'' if effect.mode == 'none' else f' ({effect.mode})'}" for effect in shown),
        bars=tuple(
            Bar(row, 0.0, float(value), "saves", f"{effect.name}: {_saves(effect)}, {_costs(effect)}")
            for row, (effect, value) in enumerate(zip(shown, values, strict=True))
        ),
    )


def _saves(effect: BlockEffect) -> str:
    sign = "saves" if effect.saves_bytes >= 0 else "takes"
    return f"{sign} {format_bytes(abs(effect.saves_bytes))}"


def _costs(effect: BlockEffect) -> str:
    return f"costs {percent(effect.costs_share)} of a micro-step"


def _row(plan: Plan, trial: Trial) -> str:
    return f"{'best, ' if trial.number == plan.best_number else ''}{trial.number}: {_split(trial)}"


def _split(trial: Trial) -> str:
    candidate = trial.candidate
    checkpointing = "" if candidate.checkpointing.mode == "none" else f" {candidate.checkpointing}"
    return f"{candidate.micro_batch_size} × {candidate.accumulation_steps} {candidate.precision}{checkpointing}"


def both_peaks(trial: Trial) -> tuple[int, int] | None:
    """The predicted and the measured peak in bytes of a trial that ran through; None where either is missing."""
    predicted, measured = trial.predicted_peak_bytes, trial.peak_reserved_bytes
    if not predicted or not measured or trial.outcome not in ("feasible", "slower"):
        return None
    return predicted, measured


def _part(name: str) -> Role:
    roles: dict[str, Role] = {role: role for role in LABELS}
    return roles[name]
