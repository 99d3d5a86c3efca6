"""How long something takes: repeated until the figures agree."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# A sample shorter than this would measure the clock and the synchronisation rather than the work.
MIN_SAMPLE_SECONDS = 0.02
# Two samples in a row that differ by less than this agree: caches are warm and clocks have settled.
AGREEMENT = 0.03
MIN_SAMPLES = 2
MAX_SAMPLES = 9
# Enough of it: short steps are sampled for at least so long, long ones for no longer than they must.
ENOUGH_SECONDS = 0.5
PATIENCE_SECONDS = 6.0
# The first round alone has to miss what can still win by this factor more, since nothing confirms it.
FIRST_ROUND_DOUBT = 1.25


@dataclass(frozen=True)
class Round:
    """One measured round of an accumulation: `micro_steps` micro-steps, then the optimizer step; seconds."""

    micro_steps: int
    micro_seconds: float
    optimizer_seconds: float

    @property
    def micro_step_seconds(self) -> float:
        """Seconds of one micro-step."""
        return self.micro_seconds / self.micro_steps

    def step_seconds(self, accumulation_steps: int) -> float:
        """Seconds of a whole effective step, composed: accumulation_steps × micro-step + optimizer step."""
        return accumulation_steps * self.micro_step_seconds + self.optimizer_seconds


def measure_rounds(
    micro_step: Callable[[], object],
    optimizer_step: Callable[[], object],
    *,
    accumulation_steps: int,
    synchronize: Callable[[], None],
    deadline: float | None = None,
    hopeless_seconds: float | None = None,
    slowest: Callable[[Sequence[float]], Sequence[float]] = list,
) -> list[Round]:
    """Rounds of micro-steps and one optimizer step, repeated until two in a row agree.

    Short micro-steps are measured several together, never more than a real accumulation has. `deadline` is a
    `time.monotonic()` after which no further round begins; at least one round is always measured. It ends early when
    even the fastest round makes a whole step that takes longer than `hopeless_seconds`. `slowest` makes of figures the
    largest that any rank has; all ranks then run the same rounds, and the slowest counts.
    """
    count = 1 if accumulation_steps == 1 else 2
    rounds = [_slowest(_round(micro_step, optimizer_step, count, synchronize), slowest)]
    micro_steps = min(accumulation_steps, max(rounds[0].micro_steps, _count_for(rounds[0].micro_step_seconds)))
    if micro_steps != rounds[0].micro_steps:
        rounds = []  # the sizing round was too short to count
    began = time.monotonic()
    while len(rounds) < MAX_SAMPLES:
        if rounds and deadline is not None and slowest([time.monotonic() - deadline])[0] >= 0:
            break
        if hopeless_seconds is not None and is_hopeless(rounds, accumulation_steps, hopeless_seconds):
            break
        rounds.append(_slowest(_round(micro_step, optimizer_step, micro_steps, synchronize), slowest))
        (spent,) = slowest([time.monotonic() - began])
        if len(rounds) >= MIN_SAMPLES and spent >= ENOUGH_SECONDS and (_agree(rounds) or spent >= PATIENCE_SECONDS):
            break
    return rounds


def is_hopeless(rounds: Sequence[Round], accumulation_steps: int, hopeless_seconds: float) -> bool:
    """Whether even the fastest of the rounds makes a whole step longer than `hopeless_seconds`."""
    limit = hopeless_seconds * (FIRST_ROUND_DOUBT if len(rounds) == 1 else 1)
    return bool(rounds) and min(r.step_seconds(accumulation_steps) for r in rounds) > limit


def repeat_rounds(
    micro_step: Callable[[], object],
    optimizer_step: Callable[[], object],
    *,
    micro_steps: int,
    seconds: float,
    synchronize: Callable[[], None],
    slowest: Callable[[Sequence[float]], Sequence[float]] = list,
) -> list[Round]:
    """Rounds of so many micro-steps and one optimizer step, repeated until `seconds` have passed; at least one."""
    began = time.monotonic()
    rounds = [_slowest(_round(micro_step, optimizer_step, micro_steps, synchronize), slowest)]
    while slowest([time.monotonic() - began])[0] < seconds and len(rounds) < MAX_SAMPLES:
        rounds.append(_slowest(_round(micro_step, optimizer_step, micro_steps, synchronize), slowest))
    return rounds


def _count_for(seconds: float) -> int:
    return int(MIN_SAMPLE_SECONDS / max(seconds, 1e-6)) + 1


def _round(
    micro_step: Callable[[], object], optimizer_step: Callable[[], object], count: int, synchronize: Callable[[], None]
) -> Round:
    synchronize()
    began = time.perf_counter()
    for _ in range(count):
        micro_step()
    synchronize()
    between = time.perf_counter()
    optimizer_step()
    synchronize()
    return Round(count, between - began, time.perf_counter() - between)


def _slowest(own: Round, slowest: Callable[[Sequence[float]], Sequence[float]]) -> Round:
    micro, optimizer = slowest([own.micro_seconds, own.optimizer_seconds])
    return Round(own.micro_steps, micro, optimizer)


def _agree(rounds: list[Round]) -> bool:
    last, before = (r.micro_seconds + r.optimizer_seconds for r in rounds[-2:])
    return abs(last - before) <= AGREEMENT * max(last, before)
