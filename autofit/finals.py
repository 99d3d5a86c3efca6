"""The end of a search: the best few measured again in turn, and the winner confirmed before it is the plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from torch.optim import Optimizer

from autofit.candidate import Candidate
from autofit.device import synchronize
from autofit.exactness import compare_with_float32
from autofit.plan import Seconds, Trial, best_trial
from autofit.progress import Progress
from autofit.stepping import PacedStep, step_until_applied
from autofit.timing import Round, repeat_rounds
from autofit.trial import TrialSetup, confirm_trial, run_trial
from autofit.units import format_seconds
from autofit.verdict import UnstableError, noise_message, spread

logger = logging.getLogger(__name__)

# Figures nearer than this may come out in the other order next time, however well each agrees with itself: what all
# rounds of one trial share, such as clocks and temperature, does not show in their spread.
CLOSE_SHARE = 0.03
MOST_FINALISTS = 3
# Each finalist runs in this many turns, for so long in each, and whole effective steps where they are no longer.
TURNS = 3
TURN_SECONDS = 0.3


class Finals:
    """Decides between trials; `trials` holds what they became, `notes` what a plan should say of it."""

    def __init__(self, trials: Sequence[Trial], setup: TrialSetup, *, deadline: float | None = None) -> None:
        self.trials = list(trials)
        self.notes: list[str] = []
        self._setup = setup
        self._deadline = deadline

    def winner(self) -> Trial | None:
        """The fastest trial that holds as a whole effective step and stays finite; None when none does.

        Those within the noise of the fastest are measured again in turn first. What was dropped as slower during the
        search comes back where what it lost against does not hold.
        """
        finalists = close_contenders(self.trials)
        if len(finalists) > 1 and (self._deadline is None or time.monotonic() < self._deadline):
            self._measure_in_turn(finalists)
        numbers = {trial.number for trial in finalists}
        while (best := self._best(numbers)) is not None:
            checked = self._checked(best)
            self._replace(checked)
            if checked.feasible:
                return checked
            logger.info("trial %d did not hold: %s", best.number, checked.message)
        return None

    def _best(self, finalists: set[int]) -> Trial | None:
        """The best finalist, else the best of the others."""
        best = best_trial([t for t in self.trials if t.number in finalists]) or best_trial(self.trials)
        dropped = max((t for t in self.trials if t.outcome == "slower"), key=_rate, default=None)
        if dropped is None or (best is not None and _rate(dropped) <= _rate(best)):
            return best
        again = run_trial(dropped.candidate, self._setup, deadline=self._deadline)
        self._replace(
            again.model_copy(update={"number": dropped.number, "predicted_peak_bytes": dropped.predicted_peak_bytes})
        )
        return self._best(finalists)

    def _checked(self, best: Trial) -> Trial:
        """The trial after its whole step, and after a comparison with float32 if it is something else.

        Up to two micro-batches, the trial itself has run the whole effective step already.
        """
        if best.candidate.accumulation_steps > 2:
            self._setup.tell(Progress("confirming the best", best.candidate))
            best = confirm_trial(best, self._setup)
        if not best.feasible or best.candidate.precision == "float32":
            return best
        self._setup.tell(Progress("comparing with float32", best.candidate))
        try:
            self.notes.append(str(compare_with_float32(best.candidate, self._setup)))
        except UnstableError as error:
            return best.model_copy(update={"outcome": "unstable", "message": str(error)})
        return best

    def _measure_in_turn(self, finalists: Sequence[Trial]) -> None:
        self._setup.tell(Progress("finals"))
        samples, failure = self._setup.attempt(measure_in_turn, [t.candidate for t in finalists])
        if samples is None:
            logger.info("the finals were not held: %s", failure.message if failure else "")
            return
        for trial, own in zip(finalists, samples, strict=True):
            self._replace(_with_times(trial, own, samples=self._setup.samples_of_all))
        self.notes.append(_describe([self._of(trial.number) for trial in finalists]))

    def _of(self, number: int) -> Trial:
        return next(trial for trial in self.trials if trial.number == number)

    def _replace(self, trial: Trial) -> None:
        self.trials = [trial if other.number == trial.number else other for other in self.trials]


def close_contenders(trials: Sequence[Trial]) -> list[Trial]:
    """The feasible trials that are as fast as the fastest as far as their measurements go: three at most, it first."""
    rated = sorted((t for t in trials if t.feasible and t.samples_per_second), key=_rate, reverse=True)
    return [t for t in rated if _rate(t) >= _rate(rated[0]) * (1 - _doubt(t, rated[0]))][:MOST_FINALISTS]


def _doubt(trial: Trial, other: Trial) -> float:
    """How far two figures may differ by noise alone, as a share: half of both spreads, at least `CLOSE_SHARE`."""
    spreads = sum(min(spread(t.step_seconds), 0.1) for t in (trial, other) if t.step_seconds)
    return max(CLOSE_SHARE, spreads / 2)


def _rate(trial: Trial) -> float:
    return trial.samples_per_second or 0.0


def measure_in_turn(setup: TrialSetup, candidates: Sequence[Candidate]) -> list[list[float]]:
    """Seconds of the steps of each candidate, measured A B C A B C; one optimizer, whose state they share."""
    optimizer = setup.make_optimizer()
    lanes = [_Lane(candidate, setup, optimizer) for candidate in candidates]
    for _ in range(TURNS):
        for lane in lanes:
            setup.meter.release()  # what the one before cached must not be what this one runs out of
            lane.turn()
    return [lane.seconds for lane in lanes]


class _Lane:
    """One finalist: its step and what it took so far."""

    def __init__(self, candidate: Candidate, setup: TrialSetup, optimizer: Optimizer) -> None:
        self._setup = setup
        self._steps = candidate.accumulation_steps
        self._step = setup.train_step(candidate, optimizer=optimizer)
        self._parts = self._step.split(setup.batch_of(setup.samples))
        self._paced = PacedStep(self._step, self._parts)
        self.seconds: list[float] = []

    def turn(self) -> None:
        """A step to warm up, then whole effective steps; rounds of as many micro-steps as there is time for, if not."""
        with self._step.activated():
            step_until_applied(self._step, self._parts[:2])
            most = self._paced.micro_steps
            sizing = self._rounds(min(2, most), seconds=0.0)[-1]
            count = int(TURN_SECONDS / max(sizing.micro_step_seconds, 1e-6)) + 1
            count = min(max(count, sizing.micro_steps), most)
            self.seconds += [r.step_seconds(self._steps) for r in self._rounds(count, seconds=TURN_SECONDS)]

    def _rounds(self, count: int, *, seconds: float) -> list[Round]:
        rounds = repeat_rounds(
            self._paced.micro_step,
            self._paced.end_of_step,
            micro_steps=count,
            seconds=seconds,
            synchronize=lambda: synchronize(self._setup.device),
            slowest=self._setup.team.slowest,
        )
        return self._paced.told_apart(rounds)


def _with_times(trial: Trial, seconds: Sequence[float], *, samples: int) -> Trial:
    """The trial with the times of the finals in place of its own."""
    times = Seconds.of(seconds)
    return trial.model_copy(
        update={
            "step_seconds": times,
            "samples_per_second": samples / times.median,
            "message": noise_message(times),
        }
    )


def _describe(finalists: Sequence[Trial]) -> str:
    figures = "; ".join(
        f"{trial.number}: {format_seconds(trial.step_seconds.median)} ({spread(trial.step_seconds):.1%})"
        for trial in finalists
        if trial.step_seconds
    )
    return (
        f"Trials too close to call were measured again in turn, seconds per step and their spread: {figures}. What is "
        "within the noise is a tie and goes to less memory, then to fewer numeric changes."
    )
