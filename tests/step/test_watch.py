"""What goes wrong slowly is noticed, named and said once; what is well is not."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autofit.candidate import Candidate
from autofit.step import TrainStep
from autofit.step import watch as module
from autofit.step.watch import EVERY, SAMPLES, Watch

ENOUGH = EVERY * (SAMPLES + 2)


@pytest.fixture(autouse=True)
def memory_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the host's memory takes long, so in training it is read seldom; not here."""
    monkeypatch.setattr(module, "READING_SHARE", 1e9)


class Net(nn.Module):
    """Keeps what it should not, if told to."""

    def __init__(self, keep: Callable[[nn.Module, torch.Tensor], None] = lambda *_: None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 64)
        self.head = nn.Linear(64, 3)
        self.keep = keep
        self.outputs: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        self.keep(self, hidden)
        return self.head(hidden)


def training(model: nn.Module) -> tuple[TrainStep, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    candidate = Candidate(micro_batch_size=4, accumulation_steps=2)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), candidate, loss_fn=F.cross_entropy)
    return step, (torch.randn(8, 4), torch.randint(3, (8,)))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_outputs_that_are_kept_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """How fast memory grows, the line that made the tensors, and the list that holds them; once."""

    def keep(net: Any, hidden: torch.Tensor) -> None:
        net.outputs.append(hidden)

    step, batch = training(Net(keep))
    for _ in range(2 * ENOUGH):
        step(batch)
    (text,) = warnings_of(caplog)
    line = Net.forward.__code__.co_firstlineno + 1
    assert "memory in use grows by 2.0 KiB a step" in text
    assert f"2 tensors (2.0 KiB a step, such as float32 [4, 64]) made at {__file__}:{line}" in text
    assert text.endswith("held by `outputs` of Net.")
    assert step.watch.growth_bytes == 2048
    assert step.watch.held is not None
    assert step.watch.held.count == 2


def test_what_the_loop_keeps_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """A list of the training function itself, here filled by a hook."""
    model = Net()
    features = []
    model.linear.register_forward_hook(lambda _m, _i, output: features.append(output.detach()))
    step, batch = training(model)
    for _ in range(ENOUGH + 2):
        step(batch)
    (text,) = warnings_of(caplog)
    assert text.endswith("held by `features` in test_what_the_loop_keeps_is_named().")


def test_batches_that_are_kept_were_not_made_by_the_step(caplog: pytest.LogCaptureFixture) -> None:
    """Growth that the step has no part in is said without a wrong name."""
    step, batch = training(Net())
    kept = []
    for _ in range(ENOUGH + 2):
        kept.append(torch.zeros(1024))
        step(batch)
    (text,) = warnings_of(caplog)
    assert "memory in use grows by 4.0 KiB a step" in text
    assert "No tensor of the step itself is held" in text


def test_a_training_that_is_well_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Losses kept as they should be are too small to matter, and the gap between steps is short."""
    step, batch = training(Net())
    losses = [step(batch).loss for _ in range(ENOUGH)]
    assert len(losses) == ENOUGH
    assert warnings_of(caplog) == []
    assert step.watch.growth_bytes is None
    assert step.watch.waiting_share is not None
    assert step.watch.waiting_share < 0.5


class Clock:
    """Time that the test tells."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def passed(self, moment: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start


def watched(*, step_seconds: float, loading: Iterator[float], pause: Callable[[Watch, int], None]) -> Watch:
    watch = Watch(torch.device("cpu"))
    clock = watch._clock = Clock()
    for number in range(ENOUGH):
        watch.begin()
        clock.time += step_seconds
        watch.end()
        pause(watch, number)
        clock.time += next(loading)
    return watch


def test_a_loader_slower_than_the_step_is_said_with_its_share(caplog: pytest.LogCaptureFixture) -> None:
    """Once, as the median over samples."""
    watch = watched(step_seconds=1.0, loading=iter([3.0] * ENOUGH), pause=lambda *_: None)
    assert watch.waiting_share == pytest.approx(0.75)
    (text,) = warnings_of(caplog)
    assert "75% of the time goes by between steps" in text


def test_a_checkpoint_now_and_then_is_no_slow_loader(caplog: pytest.LogCaptureFixture) -> None:
    """One long gap among short ones, and evaluations, do not count."""
    rare = iter([100.0 if number == EVERY - 2 else 0.1 for number in range(ENOUGH)])
    assert watched(step_seconds=1.0, loading=rare, pause=lambda *_: None).waiting_share == pytest.approx(0.1 / 1.1)
    evaluating = watched(step_seconds=1.0, loading=iter([9.0] * ENOUGH), pause=lambda watch, _: watch.interrupted())
    assert evaluating.waiting_share is None
    assert warnings_of(caplog) == []


def test_a_slow_loader_in_a_real_loop() -> None:
    """The share is that of the sleep."""
    step, batch = training(Net())
    for _ in range(3 * EVERY):
        step(batch)
        time.sleep(0.003)
    assert step.watch.waiting_share is not None
    assert step.watch.waiting_share > 0.3


def test_evaluation_between_steps_is_not_waiting() -> None:
    """Its time is left out."""
    step, batch = training(Net())
    for _ in range(3 * EVERY):
        step(batch)
        step.evaluate(batch)
    assert step.watch.waiting_share is None


def test_thrashing_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator that has to try again all the time; a single retry is none."""
    retries = iter(range(10**6))
    monkeypatch.setattr(module._Memory, "_retries", lambda _: next(retries) if thrashing else 0)
    for thrashing in (False, True):
        watch = Watch(torch.device("cpu"))
        for _ in range(ENOUGH):
            watch.begin()
            watch.end()
        assert any("try again" in text for text in warnings_of(caplog)) is thrashing
        assert (watch.alloc_retries > 0) is thrashing


def test_it_can_be_switched_off() -> None:
    """Nothing is read any more."""
    step, batch = training(Net(lambda net, hidden: net.outputs.append(hidden)))  # type: ignore[operator, union-attr]
    step.watch.enabled = False
    for _ in range(ENOUGH):
        step(batch)
    assert step.watch.growth_bytes is None
    assert step.watch.waiting_share is None


def test_a_step_that_fails_while_it_is_followed_leaves_nothing_on() -> None:
    """The mode that follows tensors is left with the step."""
    step, batch = training(Net(lambda net, hidden: net.outputs.append(hidden)))  # type: ignore[operator, union-attr]
    while step.watch._birthplaces is None:
        step(batch)
    with pytest.raises(RuntimeError):
        step((torch.randn(8, 5), batch[1]))
    assert torch._C._len_torch_dispatch_stack() == 0
