"""A plan in plain words: what takes the memory, what each technique would save and cost here, and why this plan won."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from autofit.candidate import Candidate
from autofit.insight import Alternative, Insight, StepMemory, Technique
from autofit.plan import Plan, Trial
from autofit.report.text import budget_in_words, percent, rate_in_words, recipe, tie
from autofit.units import format_bytes

PARTS: Mapping[str, str] = {
    "weights": "weights",
    "optimizer_states": "optimizer states",
    "gradients": "gradients",
    "inputs": "inputs",
    "activations": "activations",
    "temporary": "temporary",
}
PHASES = {"forward": "the forward pass", "backward": "the backward pass", "optimizer": "the optimizer step"}
# A prediction further from the measured peak than this is not to be trusted with parts of it.
FAR_OFF = 0.2
NO_PREDICTION = (
    "This plan holds no prediction of its step's memory: it is for a device or a model that cannot be predicted, or "
    "there was no time left for it. Only what was measured can be said."
)


@dataclass(frozen=True)
class Section:
    """A heading, and a sentence or two on each point."""

    title: str
    lines: tuple[str, ...]


def explain(plan: Plan) -> tuple[Section, ...]:
    """The plan in words, for people; what is predicted and what was measured is told apart."""
    seen = plan.insight or Insight()
    sections = [("What takes the memory", _memory(plan, seen))]
    if plan.best_number is not None:
        sections.append(("What each technique would save and cost here", _techniques(plan, seen)))
    sections.append(("Why this plan won" if plan.best_number is not None else "Why there is no plan", _reasons(plan)))
    made = [Section(title, tuple(lines)) for title, lines in sections]
    return tuple(section for section in made if section.lines)


def _memory(plan: Plan, seen: Insight) -> Iterator[str]:
    if plan.best_number is None:
        return
    peak = plan.best.peak_reserved_bytes
    if peak is not None:
        share = percent(peak / plan.cap_bytes)
        yield f"The step was seen to hold {format_bytes(peak)} at its peak, {share} of {budget_in_words(plan)}."
    if seen.best is None:
        yield NO_PREDICTION
        return
    yield _at_peak(seen.best)
    yield from _doubt(plan.best)
    states, parameters = seen.best.at_peak()["optimizer_states"], plan.environment.trainable_parameters
    if parameters:
        name = plan.environment.optimizer
        yield (
            f"{name} keeps {format_bytes(states)} of state, {states / parameters:.1f} bytes for each of "
            f"{parameters:,} trainable parameters, whatever the batch."
        )
    if seen.naive is not None:
        yield _naive(plan, seen.naive)


def _at_peak(step: StepMemory) -> str:
    parts = sorted(step.at_peak().items(), key=lambda item: -item[1])
    named = ", ".join(
        f"{format_bytes(nbytes)} ({percent(nbytes / step.peak_bytes)}) of {PARTS[name]}"
        for name, nbytes in parts
        if nbytes >= 0.01 * step.peak_bytes
    )
    return (
        f"Most is in use in {PHASES[step.peak_phase()]}, predicted: {format_bytes(step.peak_bytes)}, of which {named}. "
        f"With what the allocator cannot use of its segments, the step needs {format_bytes(step.needed_bytes)}."
    )


def _doubt(best: Trial) -> Iterator[str]:
    """A prediction that missed what was measured is not passed on without saying so."""
    predicted, measured = best.predicted_peak_bytes, best.peak_reserved_bytes
    if predicted and measured and abs(predicted / measured - 1) > FAR_OFF:
        off = f"{percent(abs(predicted / measured - 1))} {'below' if predicted < measured else 'above'}"
        yield (
            f"Beware: the prediction of this step is {off} what was measured, so what is predicted here and below says "
            "little about bytes; the trials were measured."
        )


def _naive(plan: Plan, naive: StepMemory) -> str:
    fits = "fits" if naive.needed_bytes <= plan.cap_bytes else "does not fit"
    return (
        f"The naive step (all {naive.candidate.micro_batch_size} samples at once, in float32, nothing recomputed) "
        f"would need {format_bytes(naive.needed_bytes)}, predicted: it {fits} into {budget_in_words(plan)}."
    )


def _techniques(plan: Plan, seen: Insight) -> Iterator[str]:
    """One line for each technique; those of which nothing is known are left out, but for what is asked most."""
    if seen.best is None:
        return
    known = {other.technique: other for other in seen.alternatives}
    compare = _Comparison(plan, seen.best.needed_bytes)
    yield from _split(plan, known, compare)
    yield from _checkpointing(plan, seen, known, compare)
    yield from _precision(plan, known, compare)
    yield from _optimizer(plan, seen.best)
    if "offload" in known:
        yield f"Offloading: activations of every block in host memory: {compare(known['offload'])}"
    elif plan.environment.device.startswith("cpu"):
        yield "Offloading: nothing to gain, the CPU's activations are in host memory."


@dataclass(frozen=True)
class _Comparison:
    """Says what another candidate needs, and how fast it was, beside the best."""

    plan: Plan
    needed_bytes: int

    def __call__(self, other: Alternative) -> str:
        change = other.needed_bytes - self.needed_bytes
        sign = f"{format_bytes(abs(change))} {'more' if change > 0 else 'less'}" if change else "the same"
        fits = "" if other.needed_bytes <= self.plan.cap_bytes else ", which does not fit"
        return f"{format_bytes(other.needed_bytes)} needed, {sign}{fits}; {self.speed(other.candidate)}."

    def speed(self, candidate: Candidate) -> str:
        """How much faster or slower it was than the best, if it was tried."""
        best = self.plan.best
        trial = next((t for t in self.plan.trials if t.candidate == candidate and t.samples_per_second), None)
        if trial is None or not best.samples_per_second or not trial.samples_per_second:
            return "its speed was not measured"
        ratio = trial.samples_per_second / best.samples_per_second
        word = "predicted" if trial.outcome == "predicted" else "measured"
        if abs(ratio - 1) < 0.01:
            return f"as fast within 1% ({word})"
        return f"{percent(abs(ratio - 1))} {'faster' if ratio > 1 else 'slower'} ({word})"


Known = Mapping[Technique, Alternative]
Compare = Callable[[Alternative], str]


def _split(plan: Plan, known: Known, compare: Compare) -> Iterator[str]:
    best = plan.candidate
    if best.accumulation_steps == 1:
        yield (
            "Batch and accumulation: the whole batch runs at once, so nothing is accumulated and the optimizer's cost "
            "is paid once for the fewest passes."
        )
    else:
        yield (
            f"Batch and accumulation: {best.accumulation_steps} micro-batches of at most {best.micro_batch_size} have "
            "the gradient of the whole batch, and only one of them is in memory at a time."
        )
    for technique, words in (("smaller_micro_batch", "Smaller"), ("larger_micro_batch", "Larger")):
        other = known.get(technique)  # type: ignore[call-overload]
        if other is not None:
            size, steps = other.candidate.micro_batch_size, other.candidate.accumulation_steps
            yield f"{words} micro-batches, {size} × {steps}: {compare(other)}"


def _checkpointing(plan: Plan, seen: Insight, known: Known, compare: Compare) -> Iterator[str]:
    names: dict[Technique, str] = {
        "no_checkpointing": "Checkpointing: without it",
        "full_checkpointing": "Checkpointing: every block recomputed",
        "selective_checkpointing": "Checkpointing: every block recomputed but for its products",
    }
    for technique, words in names.items():
        if technique in known:
            cost = ""
            if technique == "full_checkpointing" and seen.blocks:
                total = sum(block.costs_share for block in seen.blocks)
                cost = f" Recomputing costs about {percent(total)} of a micro-step without it, predicted."
            yield f"{words}: {compare(known[technique])}{cost}"
    if not seen.blocks and not known.keys() & names.keys() and plan.candidate.checkpointing.mode == "none":
        yield "Checkpointing: no blocks were found or allowed that could be recomputed."


def _precision(plan: Plan, known: Known, compare: Compare) -> Iterator[str]:
    for technique in ("bfloat16", "float16", "float32"):
        other = known.get(technique)
        if other is None:
            continue
        if technique == "float32":
            yield f"Precision: in float32 instead of {plan.candidate.precision}: {compare(other)}"
        else:
            yield (
                f"Precision: {technique} autocast: {compare(other)} Weights, gradients and optimizer states stay in "
                "float32; activations shrink, and weights are cast for each pass."
            )


def _optimizer(plan: Plan, step: StepMemory) -> Iterator[str]:
    parts, name = step.at_peak(), plan.environment.optimizer
    states = parts["optimizer_states"]
    if states >= 0.01 * step.peak_bytes:
        yield (
            f"Optimizer: {name}'s state is {percent(states / step.peak_bytes)} of the peak. One that keeps half as "
            f"much would save {format_bytes(states / 2)}, one without state {format_bytes(states)}; no split of the "
            "batch can."
        )
    if step.peak_phase() == "optimizer" and parts["temporary"] > 0.05 * step.peak_bytes:
        yield (
            f"The peak is in the optimizer step, where {format_bytes(parts['temporary'])} are temporary: a fused "
            "optimizer (fused=True) does without most of them, and recomputing activations does not help."
        )


def _reasons(plan: Plan) -> Iterator[str]:
    ran = [trial for trial in plan.trials if trial.was_run]
    counts = {outcome: sum(t.outcome == outcome for t in plan.trials) for outcome in ("feasible", "predicted")}
    if plan.best_number is None:
        yield f"None of {len(plan.trials)} trials fits into {budget_in_words(plan)}."
        known = [trial for trial in plan.trials if trial.known_peak_bytes is not None]
        smallest = min(known, key=lambda trial: trial.known_peak_bytes or 0, default=None)
        if smallest is not None:
            yield f"The least was held by {smallest.candidate}: {format_bytes(smallest.known_peak_bytes or 0)}."
        return
    yield recipe(plan)
    if plan.best.outcome == "predicted":
        yield f"Of {len(plan.trials)} candidates {counts['predicted']} are predicted to fit, and it is the fastest."
    else:
        ties = tuple(tie(plan))
        fastest = "" if ties else ", and it is the fastest of those"
        yield f"Of {len(ran)} candidates that were run, {counts['feasible']} fit{fastest}."
        yield from ties
    yield from _runner_up(plan)
    yield from _beyond(plan)


def _runner_up(plan: Plan) -> Iterator[str]:
    own = plan.best.samples_per_second
    others = [t for t in plan.trials if t.outcome == plan.best.outcome and t is not plan.best and t.samples_per_second]
    if not own or not others:
        return
    second = max((t for t in others if (t.samples_per_second or 0) <= own), key=_rate, default=None)
    if second is not None:
        yield (
            f"The next fastest, {second.candidate}, has {rate_in_words(second)} samples/s "
            f"({percent(1 - _rate(second) / own)} less) at {format_bytes(second.known_peak_bytes or 0)}."
        )


def _beyond(plan: Plan) -> Iterator[str]:
    """The nearest thing that did not fit, for whoever could have a little more memory."""
    failed = [trial for trial in plan.trials if trial.outcome in ("over_budget", "out_of_memory")]
    above = [trial for trial in failed if (trial.known_peak_bytes or 0) > plan.cap_bytes]
    if above:
        nearest = min(above, key=lambda t: t.known_peak_bytes or 0)
        yield (
            f"The nearest that does not fit, {nearest.candidate}, needs {format_bytes(nearest.known_peak_bytes or 0)}"
            f"{', predicted' if nearest.peak_reserved_bytes is None else ''}."
        )


def _rate(trial: Trial) -> float:
    return trial.samples_per_second or 0.0
