"""Several ranks: one target, one candidate at a time, one plan; and what becomes of a rank that is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.candidate import SearchSpace, balanced
from autofit.errors import ConfigError, InfeasibleError, RankLostError
from autofit.plan import Plan
from autofit.units import MiB
from tests.models import Wide, vector_batch
from tests.ranks import Ended, results, run_ranks

pytestmark = pytest.mark.distributed

FLOAT32 = SearchSpace(precision="float32", checkpointing="none")


class Meeting(Wide):
    """Runs `on_forward`, `on_backward` with each micro-batch's size at that point."""

    def __init__(
        self, on_forward: Callable[[int], None] | None = None, on_backward: Callable[[int], None] | None = None
    ) -> None:
        super().__init__()
        self.on_forward, self.on_backward = on_forward, on_backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.on_forward is not None:
            self.on_forward(len(x))
        hidden = torch.relu(self.first(x))
        if self.on_backward is not None and hidden.requires_grad:
            size, run = len(x), self.on_backward
            hidden.register_hook(lambda gradient: run(size))
        return self.third(torch.relu(self.second(hidden)))


def tune(rank: int, model: nn.Module, **options: Any) -> Plan:
    """The plan of a small model for 37 samples, on the CPU."""
    arguments: dict[str, Any] = {
        "target_batch": 37,
        "device": "cpu",
        "budget": 400 * MiB,
        "space": FLOAT32,
        "max_trials": 2,
        "rank_timeout": 60,
        **options,
    }
    return autofit.tune(model, vector_batch(4), **arguments)


def tune_unevenly(rank: int) -> tuple[str, bool, int]:
    """The plan, whether the model is as it was, and how many trials this rank was told of."""
    torch.manual_seed(rank)
    model, told = Wide(), []
    before = [p.detach().clone() for p in model.parameters()]
    plan = tune(rank, model, budget=(400 * MiB, 300 * MiB)[rank], on_trial=told.append)
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return plan.to_json(), same, len(told)


def test_all_ranks_get_the_same_plan() -> None:
    """An odd target on 2 ranks, of which the second may use less: one plan, for both, and every model as it was."""
    (first, same, told), (second, also_same, untold) = results(run_ranks(tune_unevenly, 2))
    plan = Plan.from_json(first)
    assert first == second
    assert same
    assert also_same
    assert (told, untold) == (len(plan.trials), 0)
    assert (plan.world_size, plan.budget_bytes) == (2, 300 * MiB)
    assert {trial.candidate.parallelism.mode for trial in plan.trials} == {"ddp"}
    assert max(trial.candidate.micro_batch_size for trial in plan.trials) == 19
    seconds = plan.best.step_seconds
    assert seconds is not None
    assert plan.best.samples_per_second == pytest.approx(37 / seconds.median)


def run_out_on_one(rank: int, above: int, trials: int) -> str:
    """Tunes where rank 1 runs out in backward of micro-batches larger than `above`; the plan or the error as text."""

    def backward(size: int) -> None:
        if rank == 1 and size > above:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    try:
        return tune(rank, Meeting(on_backward=backward), max_trials=trials).to_json()
    except InfeasibleError as error:
        return f"InfeasibleError: {error}"


def test_memory_that_runs_out_on_one_rank_has_run_out_on_all() -> None:
    """In backward, while others wait in its collectives: nobody hangs, and nothing that large is the plan."""
    first, second = results(run_ranks(run_out_on_one, 2, 6, 3))
    plan = Plan.from_json(first)
    assert first == second
    assert plan.candidate.micro_batch_size <= 6
    outcomes = {t.candidate.micro_batch_size > 6: set() for t in plan.trials}
    for trial in plan.trials:
        outcomes[trial.candidate.micro_batch_size > 6].add(trial.outcome)
    assert outcomes[True] == {"out_of_memory"}
    assert all("rank 1: backward" in t.message for t in plan.trials if t.outcome == "out_of_memory")


def test_where_nothing_fits_all_ranks_say_so() -> None:
    """The same InfeasibleError everywhere."""
    first, second = results(run_ranks(run_out_on_one, 2, 0, 1))
    assert first == second
    assert first.startswith("InfeasibleError: Nothing fits")


class Deadly(torch.optim.SGD):
    """Does something to its process at its first step."""

    blow: Callable[[], None] | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if Deadly.blow is not None:
            Deadly.blow()
        super().step(closure)


def lose(rank: int, victim: int, phase: str, number: int, timeout: float) -> tuple[int, ...]:
    """The ranks that an error names when `victim` is sent a signal in its n-th trial step's `phase`."""
    torch.manual_seed(0)

    def blow(*_: Any) -> None:
        if rank == victim and torch._C._len_torch_dispatch_stack() > 0:  # within a metered step
            os.kill(os.getpid(), number)

    points = {"forward": "on_forward", "backward": "on_backward"}
    model = Meeting(**({points[phase]: lambda size: blow() if size > 4 else None} if phase in points else {}))
    Deadly.blow = blow if phase == "optimizer" else None
    before = [p.detach().clone() for p in model.parameters()]
    try:
        tune(rank, model, optimizer=lambda p: Deadly(p, lr=0.1), target_batch=24, rank_timeout=timeout)
    except RankLostError as error:
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return error.ranks
    raise AssertionError("no rank was lost")


def survivors_of(ended: list[Ended], victim: int) -> list[Any]:
    return results([end for rank, end in enumerate(ended) if rank != victim])


@pytest.mark.parametrize(("phase", "victim"), [("forward", 1), ("backward", 2), ("optimizer", 0)])
def test_a_killed_rank_is_named_by_all_others(phase: str, victim: int) -> None:
    """SIGKILL in the middle of a trial: every other rank ends with the number of the dead one, its model restored."""
    ended = run_ranks(lose, 3, victim, phase, int(signal.SIGKILL), 60.0)
    assert ended[victim].signal == signal.SIGKILL
    assert survivors_of(ended, victim) == [(victim,)] * 2


def test_a_stuck_rank_is_named_after_the_deadline() -> None:
    """A rank that is stopped and never goes on."""
    ended = run_ranks(lose, 3, 1, "forward", int(signal.SIGSTOP), 4.0, timeout=60, stuck=1)
    assert survivors_of(ended, 1) == [(1,)] * 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("repeat", range(100))
def test_nobody_hangs(repeat: int) -> None:
    """A hundred deaths, at every place and of every rank."""
    victim, phase = repeat % 3, ("forward", "backward", "optimizer")[repeat // 3 % 3]
    ended = run_ranks(lose, 3, victim, phase, int(signal.SIGKILL), 60.0)
    assert survivors_of(ended, victim) == [(victim,)] * 2


def stop_before_the_first_trial(rank: int) -> str:
    """What the ranks say where one of them cannot even begin."""
    if rank == 1:
        with pytest.raises(ConfigError, match="not a size"):
            tune(rank, Wide(), budget="all of it")
        return "refused"
    with pytest.raises(RankLostError, match="Rank 1 of 2 stopped: ConfigError") as caught:
        tune(rank, Wide())
    return str(caught.value.ranks)


def test_a_rank_that_stops_stops_all() -> None:
    """What is wrong with one rank's call is said on all of them."""
    assert results(run_ranks(stop_before_the_first_trial, 2)) == ["(1,)", "refused"]


def refuse(rank: int) -> list[str]:
    """What cannot be meant in a process group, in words."""
    messages = []
    calls: list[dict[str, Any]] = [
        {"target_batch": 1},
        {"space": SearchSpace(parallelism="none")},
        {"target_batch": 8 + rank},
    ]
    for options in calls:
        with pytest.raises(ConfigError) as caught:
            tune(rank, Wide(), **options)
        messages.append(str(caught.value))
    return messages


def test_what_cannot_be_meant_is_refused_on_all_ranks() -> None:
    """Fewer samples than ranks, ranks that train apart, ranks that ask for different things."""
    first, second = results(run_ranks(refuse, 2))
    assert first == second
    assert [word in text for word, text in zip(("2 ranks", "'none'", "rank 1: Wide"), first, strict=True)] == [True] * 3


def test_a_share_of_the_target_is_within_one_sample() -> None:
    """Ranks whose number does not divide the target get shares that differ by one."""
    assert balanced(37, 2) == (19, 18)


def test_parallelism_needs_a_process_group() -> None:
    """On its own a process has nobody to be parallel with."""
    with pytest.raises(ConfigError, match="torchrun"):
        autofit.tune(Wide(), vector_batch(), target_batch=8, space=SearchSpace(parallelism="ddp"), device="cpu")
