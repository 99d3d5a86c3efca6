"""Durations are repeated until they agree; the clock is a simulated one."""

from __future__ import annotations

import pytest

from autofit import timing


class Clock:
    """Time that passes only when work is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, micro: list[float] | float, optimizer: float = 0.01) -> None:
        self.now = 0.0
        self.micro_steps = 0
        self.optimizer_steps = 0
        self._micro = micro
        self._optimizer = optimizer
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timing.time, "monotonic", lambda: self.now)

    def micro_step(self) -> None:
        if isinstance(self._micro, list):
            self.now += self._micro[min(self.micro_steps, len(self._micro) - 1)]
        else:
            self.now += self._micro
        self.micro_steps += 1

    def optimizer_step(self) -> None:
        self.now += self._optimizer
        self.optimizer_steps += 1

    def measure(
        self, accumulation_steps: int, deadline: float | None = None, hopeless_seconds: float | None = None
    ) -> list[timing.Round]:
        return timing.measure_rounds(
            self.micro_step,
            self.optimizer_step,
            accumulation_steps=accumulation_steps,
            synchronize=lambda: None,
            deadline=deadline,
            hopeless_seconds=hopeless_seconds,
        )


def test_a_step_is_composed(monkeypatch: pytest.MonkeyPatch) -> None:
    """H2: seconds, not milliseconds: accumulation_steps × micro-step + optimizer step, without running them all."""
    clock = Clock(monkeypatch, micro=1.0, optimizer=0.5)
    rounds = clock.measure(accumulation_steps=100)
    assert rounds[0].step_seconds(100) == pytest.approx(100.5)
    assert clock.micro_steps < 10


@pytest.mark.parametrize(("micro", "steps"), [(5.0, 1), (1.0, 2), (0.001, 64), (0.00001, 1000)])
def test_sampled_enough_and_not_more(monkeypatch: pytest.MonkeyPatch, micro: float, steps: int) -> None:
    """Long steps are measured twice; short ones several together, never more than a real accumulation has."""
    clock = Clock(monkeypatch, micro=micro, optimizer=micro)
    rounds = clock.measure(accumulation_steps=steps)
    assert len(rounds) >= 2
    assert all(r.micro_steps <= steps for r in rounds)
    assert all(r.micro_step_seconds == pytest.approx(micro) for r in rounds)
    assert clock.now <= max(5 * 2 * 2 * micro, 2.0)


def test_repeats_until_two_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up that is slow does not end the measurement."""
    clock = Clock(monkeypatch, micro=[3.0, 2.0, 1.0, 0.5, 0.5, 0.5], optimizer=0.0)
    rounds = clock.measure(accumulation_steps=1)
    assert rounds[-1].micro_seconds == rounds[-2].micro_seconds == 0.5


def test_a_noisy_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures that never agree are sampled a bounded number of times."""
    clock = Clock(monkeypatch, micro=[0.1 * (1 + n % 2) for n in range(100)], optimizer=0.0)
    assert len(clock.measure(accumulation_steps=1)) == timing.MAX_SAMPLES


def test_a_deadline_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the deadline no further round begins, but one is always measured."""
    clock = Clock(monkeypatch, micro=10.0)
    assert len(clock.measure(accumulation_steps=4, deadline=5.0)) == 1


@pytest.mark.parametrize(("limit", "rounds"), [(39.0, 1), (43.0, 2), (56.0, 2), (1.0, 1)])
def test_a_hopeless_race_is_given_up(monkeypatch: pytest.MonkeyPatch, limit: float, rounds: int) -> None:
    """Far behind after one round it ends; a little behind it takes a second one."""
    clock = Clock(monkeypatch, micro=10.0, optimizer=10.0)
    assert len(clock.measure(accumulation_steps=4, hopeless_seconds=limit)) == rounds


def test_one_slow_round_is_not_hopeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest round counts: a hiccup in the first or a later one does not lose the race."""
    clock = Clock(monkeypatch, micro=[0.1, 0.3, 0.1, 0.1, 0.1, 0.1], optimizer=0.0)
    assert len(clock.measure(accumulation_steps=1, hopeless_seconds=0.105)) > 2


def test_rounds_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are repeated until the time is up, one at least."""
    clock = Clock(monkeypatch, micro=1.0, optimizer=0.0)
    arguments = {"micro_steps": 2, "synchronize": lambda: None}
    assert len(timing.repeat_rounds(clock.micro_step, clock.optimizer_step, seconds=5.0, **arguments)) == 3
    assert len(timing.repeat_rounds(clock.micro_step, clock.optimizer_step, seconds=0.0, **arguments)) == 1
