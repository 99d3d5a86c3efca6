"""One candidate, tried for real: metered under the cap, timed, judged, and everything put back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.batch import BatchLayout
from autofit.batch.nest import leaves
from autofit.candidate import Candidate
from autofit.device import synchronize
from autofit.distributed import Kept, Report, Team, first_failure
from autofit.errors import AutofitError, DeviceLostError
from autofit.memory import Meter, Reading
from autofit.oom import Failure, guarded
from autofit.optimizers import OptimizerFactory
from autofit.plan import Trial
from autofit.progress import Progress, Tell, tell_nobody
from autofit.snapshot import Snapshot
from autofit.step.accumulation import LossOptions, Part
from autofit.step.train_step import TrainStep
from autofit.stepping import PacedStep, check_gradients, resident, step_until_applied
from autofit.timing import Round, measure_rounds
from autofit.verdict import agreed_trial, failed_trial, hopeless_seconds, judge_memory, measured_trial

T = TypeVar("T")


@dataclass(frozen=True)
class TrialSetup:
    """What all trials of one tuning share.

    `samples` is one rank's share of the target batch; `outside_bytes` what the process used on the device outside the
    allocator when `cap_bytes` was computed; `loss_options` say what the loss is; `tell` hears what begins; `team` are
    the ranks that try together, `target_samples` what all of them train per step (left out: this one's).
    """

    model: nn.Module
    sample_batch: Any
    layout: BatchLayout
    samples: int
    device: torch.device
    meter: Meter
    cap_bytes: int
    outside_bytes: int
    snapshot: Snapshot
    make_optimizer: OptimizerFactory
    loss_options: LossOptions = field(default_factory=LossOptions)
    tell: Tell = tell_nobody
    team: Team = field(default_factory=Team)
    target_samples: int | None = None

    def train_step(self, candidate: Candidate, *, optimizer: Optimizer | None = None) -> TrainStep:
        """The step that a user would train with, on an optimizer of its own unless one is shared."""
        optimizer = optimizer or self.make_optimizer()
        group = self.team.group
        return TrainStep(self.model, optimizer, candidate, device=self.device, process_group=group, **self.loss_options)

    def batch_of(self, samples: int) -> Any:
        """The sample batch, cut or tiled to so many samples."""
        return self.layout.resize(self.sample_batch, samples)

    def batch_is_on_device(self) -> bool:
        """Whether the user's batches lie on the accelerator as a whole, so that all of one counts."""
        tensors = [leaf for _, leaf in leaves(self.sample_batch) if isinstance(leaf, torch.Tensor)]
        return any(tensor.device.type != "cpu" for tensor in tensors)

    def outside_growth_bytes(self) -> int:
        """Growth of what the process uses outside the allocator since the cap was computed: kernels load lazily."""
        return max(0, self.meter.outside_bytes() - self.outside_bytes)

    def attempt(self, work: Callable[..., T], *arguments: Any) -> tuple[T, None] | tuple[None, Failure]:
        """`work(setup, *arguments)` on every rank, each with its own setup, and then recovery on each.

        Gives what this rank made of it, or the first failure of any rank. `work` is a function of a module, and its
        arguments are picklable. Raises DeviceLostError where the failure says so: it never means that something did
        not fit.
        """
        reports = self.reports(_kept, work, *arguments)
        failure = self.first_failure(reports)
        own = reports[self.team.rank].value
        if failure is not None:
            return None, failure
        assert own is not None
        return own.value, None

    def reports(self, work: Callable[..., T], *arguments: Any) -> list[Report[T]]:
        """As `attempt`, with what every rank says; what they made of it has to be picklable."""
        return self.team.run(work, self, *arguments, recover=self.recover)

    def first_failure(self, reports: list[Report[Any]]) -> Failure | None:
        """The first failure of any rank, if there is one; raises DeviceLostError where it is a lost device."""
        failure = first_failure(reports)
        if failure is not None and failure.kind == "device_lost":
            raise DeviceLostError(
                f"The device context of {self.device} is lost: {failure.message}. Start a new process."
            ) from failure.error
        return failure

    @property
    def samples_of_all(self) -> int:
        """Samples of an optimizer step over all ranks."""
        return self.target_samples or self.samples

    def recover(self) -> None:
        """After a trial, outside any `except`: values back, gradients gone, memory given back.

        Raises DeviceLostError when the device does not answer any more.
        """
        _, failure = guarded(self._recover)
        if failure is not None:
            if isinstance(failure.error, AutofitError):
                raise failure.error
            raise DeviceLostError(
                f"The device {self.device} does not answer after a trial ({failure.message}). Start a new process."
            ) from failure.error

    def _recover(self) -> None:
        self.meter.release()
        self.snapshot.rewind()
        torch.zeros(1, device=self.device).add_(1)
        synchronize(self.device)


def run_trial(
    candidate: Candidate, setup: TrialSetup, *, deadline: float | None = None, rival: Trial | None = None
) -> Trial:
    """Runs one candidate at its full micro-batch and says what it took; the number is the caller's to set.

    Two optimizer steps are metered, the second with the optimizer's state resident; then micro-steps and optimizer
    steps are timed. One that is clearly slower than `rival` is dropped after a few micro-steps, as `slower`. Whatever
    fails, the model is as it was before. Where there are several ranks, all of them run it, and the trial says what
    holds for all. Raises DeviceLostError when the device context is gone.
    """
    seconds = None if deadline is None else deadline - time.monotonic()
    return agreed_trial(setup.reports(_measured, candidate, seconds, hopeless_seconds(rival)))


def _measured(setup: TrialSetup, candidate: Candidate, seconds: float | None, hopeless: float | None) -> Trial:
    run = _Run(candidate, setup)
    deadline = None if seconds is None else time.monotonic() + seconds
    rounds, failure = setup.team.guarded(partial(run.measure, deadline, hopeless))
    reading, phase, outside = run.reading(), run.phase, setup.outside_growth_bytes()
    if failure is not None:
        return failed_trial(candidate, failure, phase=phase, reading=reading, device=setup.device)
    assert rounds is not None
    assert reading is not None
    return measured_trial(
        candidate,
        rounds,
        reading,
        samples=setup.samples,
        cap_bytes=setup.cap_bytes,
        outside_bytes=outside,
        hopeless_seconds=hopeless,
    )


def meter_trial(candidate: Candidate, setup: TrialSetup, *, whole: bool) -> Trial:
    """Runs one candidate under the cap without timing it, and says whether it fits.

    After a step that makes the optimizer's state comes the `whole` effective step, every micro-batch at its own size,
    or else its largest micro-batch only, on gradients that are there already if it accumulates.
    """
    return agreed_trial(setup.reports(_metered, candidate, whole))


def _metered(setup: TrialSetup, candidate: Candidate, whole: bool) -> Trial:
    run = _Run(candidate, setup)
    _, failure = setup.team.guarded(run.whole_step if whole else run.largest_micro_batch)
    reading, phase, outside = run.reading(), run.phase, setup.outside_growth_bytes()
    if failure is not None:
        return failed_trial(candidate, failure, phase=phase, reading=reading, device=setup.device)
    assert reading is not None
    outcome, message = judge_memory(reading, cap_bytes=setup.cap_bytes, outside_bytes=outside)
    return Trial(
        number=0,
        candidate=candidate,
        outcome=outcome,
        peak_reserved_bytes=reading.peak_reserved_bytes,
        peak_allocated_bytes=reading.peak_allocated_bytes,
        alloc_retries=reading.alloc_retries,
        message=message,
    )


def confirm_trial(trial: Trial, setup: TrialSetup) -> Trial:
    """The trial's candidate again as a whole effective step, every micro-batch at its own size, under the cap.

    Gives the trial with the larger of both peaks, or with the outcome that the whole step had.
    """
    seen = meter_trial(trial.candidate, setup, whole=True)
    if seen.outcome not in ("feasible", "over_budget"):
        return trial.model_copy(update={"outcome": seen.outcome, "message": f"whole step, {seen.message}"})
    peaks = {
        name: max(getattr(seen, name), getattr(trial, name) or 0)
        for name in ("peak_reserved_bytes", "peak_allocated_bytes")
    }
    return trial.model_copy(update={"outcome": seen.outcome, "message": seen.message or trial.message, **peaks})


def measure_need(candidate: Candidate, setup: TrialSetup, *, available_bytes: int) -> Reading | None:
    """What a candidate needs when the budget does not hold it back; None where even the device has too little."""
    reports = setup.reports(_needed, candidate, available_bytes)
    readings = [report.value for report in reports if report.value is not None]
    if setup.first_failure(reports) is not None:
        return None
    return max(readings, key=lambda reading: reading.peak_reserved_bytes)


def _needed(setup: TrialSetup, candidate: Candidate, available_bytes: int) -> Reading:
    run = _Run(candidate, setup, enforce=False)
    with setup.meter.capped(available_bytes):
        run.meter_steps()
    reading = run.reading()
    assert reading is not None
    return reading


def _kept(setup: TrialSetup, work: Callable[..., T], *arguments: Any) -> Kept[T]:
    """What work made, for the rank itself: gradients and the like do not travel."""
    return Kept(work(setup, *arguments))


class _Run:
    """The life of one trial up to an exception. It holds tensors: drop it before recovering."""

    def __init__(self, candidate: Candidate, setup: TrialSetup, *, enforce: bool = True) -> None:
        self._candidate = candidate
        self._setup = setup
        self._cap_bytes = setup.cap_bytes if enforce else None
        self._step: TrainStep | None = None
        self._read: Callable[[], Reading] | None = None

    @property
    def phase(self) -> str:
        return self._step.phase if self._step is not None and self._read is not None else "setup"

    def reading(self) -> Reading | None:
        return self._read() if self._read is not None else None

    def measure(self, deadline: float | None, hopeless_seconds: float | None) -> list[Round]:
        step, parts = self.meter_steps()
        seen = self.reading()
        peak = None if seen is None else seen.peak_reserved_bytes
        self._setup.tell(Progress("measuring time", self._candidate, peak, cap_bytes=self._setup.cap_bytes))
        paced = PacedStep(step, parts)
        with step.activated():
            check_gradients(step, parts[0])
            rounds = measure_rounds(
                paced.micro_step,
                paced.end_of_step,
                accumulation_steps=paced.micro_steps,
                synchronize=lambda: synchronize(self._setup.device),
                deadline=deadline,
                hopeless_seconds=hopeless_seconds,
                slowest=self._setup.team.slowest,
            )
        return paced.told_apart(rounds)

    def meter_steps(self) -> tuple[TrainStep, list[Part]]:
        """Two optimizer steps: the first makes the optimizer's state, the second has it and accumulates."""
        setup = self._setup
        step = setup.train_step(self._candidate)
        full = setup.batch_is_on_device()
        samples = setup.samples if full else sum(self._candidate.split(setup.samples)[:2])
        parts = step.split(setup.batch_of(samples))[:2]
        self._meter(step, self._first(parts, parts[:1]), parts)
        return step, parts

    def _first(self, parts: list[Part], small: list[Part]) -> list[Part]:
        """The step that makes the optimizer's state, small where it may be.

        Where ranks exchange gradients, the first one accumulates outside of the buckets, and has to be seen doing so.
        """
        return small if self._candidate.parallelism.mode == "none" else parts[:2]

    def whole_step(self) -> None:
        """A small optimizer step that makes the optimizer's state, then the whole effective step."""
        step = self._setup.train_step(self._candidate)
        parts = step.split(self._setup.batch_of(self._setup.samples))
        self._meter(step, self._first(parts, parts[-1:]), parts)

    def largest_micro_batch(self) -> None:
        """Steps as small as the sample batch make state and gradients; then the largest micro-batch of all."""
        setup = self._setup
        step = setup.train_step(self._candidate)
        size = self._candidate.micro_batch_size
        full = step.split(setup.batch_of(setup.samples if setup.batch_is_on_device() else size))[:1]
        small = step.split(setup.batch_of(min(setup.layout.samples, size)))
        self._meter(step, small, small + full if self._candidate.accumulation_steps > 1 else full)

    def _meter(self, step: TrainStep, *optimizer_steps: list[Part]) -> None:
        self._step = step
        metered = self._setup.meter.metered(cap_bytes=self._cap_bytes, resident=resident(step))
        with step.activated(), metered as self._read:
            for parts in optimizer_steps:
                step_until_applied(step, parts)
