"""`tune()`: from a model, a batch and a target to the plan that trains it fastest within the budget."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.budget import Budget
from autofit.cache import PlanCache
from autofit.candidate import Candidate, SearchSpace, balanced
from autofit.checks import check_call, check_same_call
from autofit.device import DeviceInfo, half_precision
from autofit.distributed import team_of_all
from autofit.environment import describe_environment
from autofit.errors import DeviceLostError, InfeasibleError, StepError, StorageError
from autofit.fidelity import keep_faithful
from autofit.finals import Finals
from autofit.foresight import Foresight
from autofit.leftovers import Leftovers
from autofit.loss import loss_facts
from autofit.plan import Plan, Trial, best_trial
from autofit.predict import Predictor
from autofit.preparation import prepared
from autofit.probe import describe_blocks, probe
from autofit.progress import Progress, Tell, tell_nobody
from autofit.search import search
from autofit.space import candidates, least_demanding, mask_modes, offloading, parallelisms
from autofit.step.accumulation import LossOptions
from autofit.step.blocks import Blocks
from autofit.trial import TrialSetup, measure_need, run_trial
from autofit.units import format_bytes
from autofit.verdict import noise_notes

logger = logging.getLogger(__name__)


def tune(
    model: nn.Module,
    sample_batch: Any,
    *,
    target_batch: int,
    loss_fn: Callable[..., Any] | None = None,
    compute_loss: Callable[..., Any] | None = None,
    loss_weight: Callable[[Any], Any] | Literal["samples", "sum"] | None = None,
    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    device: str | torch.device | None = None,
    budget: str | int | float | None = None,
    space: SearchSpace | None = None,
    batch_dims: Any = None,
    max_trials: int | None = None,
    timeout: float | None = None,
    seed: int = 0,
    storage: str | None = None,
    study_name: str | None = None,
    on_trial: Callable[[Trial], None] | None = None,
    on_progress: Tell | None = None,
    cache: str | os.PathLike[str] | None = None,
    rank_timeout: float = 600.0,
) -> Plan:
    """Finds the fastest training step of exactly `target_batch` samples that stays within the memory budget.

    Real training steps run under candidate configurations. Afterwards the model, the optimizer, random states and
    torch's switches are what they were, bit for bit, whether this returned, raised or was interrupted.

    `sample_batch`: any nest of tensors with the samples along dim 0; cut and tiled to the sizes that are tried.
    `batch_dims` says where the samples lie otherwise: one dim for all tensors, or `{path: dim or None}`.
    `loss_fn(output, target)` for `(inputs…, target)` batches; dict batches call `model(**batch)` and use its `.loss`;
    `compute_loss(model, batch)` takes over entirely. `loss_weight(batch)` weighs micro-batches, `"sum"` says that the
    loss is a sum; by default a mean over samples. `optimizer`: one that exists, a callable of the parameters, or AdamW.
    `budget`: `"8GiB"`, bytes, a fraction such as 0.9, or what is free now. `max_trials` and `timeout` (seconds) bound
    the search. `storage`: an Optuna storage URL, so that a killed run goes on where it stopped. `on_trial` is called
    with each trial as it ends, `on_progress` with an `autofit.progress.Progress` as each part of the work begins.
    `cache`: a folder of plans. The same request for the same model on the same device and versions gets its plan back
    after one whole step that confirms it; see `autofit.cache`.

    In an initialised process group every rank makes the same call, with a batch of its own. `target_batch` is met over
    all of them, trials exchange gradients, and all return the same plan; `on_trial`, `storage` and `cache` are used on
    rank 0 only. A rank that takes longer than `rank_timeout` seconds for one trial counts as stuck.

    Raises ConfigError, InfeasibleError, StepError, DeviceLostError, StorageError, RankLostError, RestoreError: see
    `autofit.errors`.
    """
    check_call(model, target_batch=target_batch, max_trials=max_trials, timeout=timeout, space=space)
    began = time.monotonic()
    options: LossOptions = {
        "loss_fn": loss_fn,
        "compute_loss": compute_loss,
        "loss_weight": loss_weight,
        "batch_dims": batch_dims,
    }
    with ExitStack() as entered:
        team = entered.enter_context(team_of_all(timeout=rank_timeout))
        check_same_call(team, model, target_batch=target_batch)
        ready = entered.enter_context(
            prepared(
                model,
                sample_batch,
                samples=balanced(target_batch, team.size)[team.rank],
                optimizer=optimizer,
                device=device,
                budget=budget,
                loss_options=options,
                team=team,
                target_samples=target_batch,
            )
        )
        callers = ready.boundary.callers
        setup = replace(ready.setup, tell=callers(on_progress) if on_progress and team.rank == 0 else tell_nobody)

        request = {"target_batch": target_batch, "budget": budget, "space": (space or SearchSpace()).model_dump()}
        request |= {"max_trials": max_trials, "timeout": timeout, "seed": seed, "ranks": team.size}

        def found() -> Plan:
            kept = None if cache is None else PlanCache(cache, ready, request)
            if kept is not None and (plan := kept.confirmed()) is not None:
                return plan
            foresight = Foresight(
                _predictor(setup, optimizer),
                samples=setup.samples,
                cap_bytes=ready.allowance.cap_bytes,
                bucket_bytes=sum(p.nbytes for p in model.parameters() if p.requires_grad),
                deadline=None if timeout is None else began + timeout,
            )
            tuning = _Tuning(
                setup,
                ready.info,
                ready.allowance,
                space or SearchSpace(),
                foresight,
                target_batch,
                seed,
                optimizer_name=type(setup.make_optimizer()).__name__,
                leftovers=Leftovers(setup.device),
            )
            remaining = None if timeout is None else max(timeout - (time.monotonic() - began), 0.001)
            plan = tuning.run(
                max_trials=max_trials,
                timeout=remaining,
                storage=storage,
                study_name=study_name,
                on_trial=None if on_trial is None else callers(on_trial),
            )
            if kept is not None:
                kept.save(plan)
            return plan

        return team.lead(setup, found, recover=setup.recover)


def _predictor(setup: TrialSetup, optimizer: Any) -> Predictor | None:
    """The predictor for the device, on the very model, batch, loss and optimizer; None for devices without a model."""
    if setup.device.type not in ("cpu", "cuda"):
        return None
    return Predictor(setup.model, setup.sample_batch, optimizer=optimizer, device=setup.device, **setup.loss_options)


@dataclass
class _Tuning:
    """One run of tune(): the trials so far, and what the plan will say."""

    setup: TrialSetup
    info: DeviceInfo
    allowance: Budget
    space: SearchSpace
    foresight: Foresight
    target_batch: int
    seed: int
    optimizer_name: str
    leftovers: Leftovers
    trials: list[Trial] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def run(
        self,
        *,
        max_trials: int | None,
        timeout: float | None,
        storage: str | None,
        study_name: str | None,
        on_trial: Callable[[Trial], None] | None,
    ) -> Plan:
        self.notes += [self.allowance.note, self.setup.layout.describe()]
        self.setup.tell(Progress("checking the model"))
        try:
            choices = self._choices()
            deadline = None if timeout is None else time.monotonic() + timeout
            self.trials = search(
                choices,
                partial(self._evaluate, deadline=deadline),
                predict=self._needed_bytes,
                cap_bytes=self.allowance.cap_bytes,
                max_trials=max_trials,
                timeout=timeout,
                seed=self.seed,
                storage=storage,
                study_name=study_name,
                on_trial=self._remember(on_trial),
            )
            best = self._decided(deadline)
        except (DeviceLostError, StorageError) as error:
            error.plan = self._plan(best_trial(self.trials))
            raise
        if best is None:
            self._raise_nothing_fits(choices)
        self.notes += [*noise_notes(best, self.trials), *self._batch_norm_note(best)]
        return self._plan(best)

    def _batch_norm_note(self, best: Trial) -> list[str]:
        """What accumulation cannot make equal: normalisation by the statistics of a micro-batch."""
        norms = [m for m in self.setup.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
        size = best.candidate.micro_batch_size
        if not norms or size == self.target_batch:
            return []
        return [
            f"BatchNorm normalises over a micro-batch, so over {size} samples and not {self.target_batch}; its running "
            f"statistics are updated {best.candidate.accumulation_steps} times per step."
        ]

    def _choices(self) -> list[Candidate]:
        """The candidates that this model can run on this device; a probe says which."""
        probed = probe(self.setup, block_patterns=self.space.checkpoint_blocks)
        self.notes += probed.notes
        blocks = probed.blocks if self.space.checkpointing == ("none",) else self._recomputable(probed.blocks)
        self.notes += describe_blocks(blocks)
        together = parallelisms(self.space, ranks=self.setup.team.size, unused=probed.unused)
        choices = candidates(
            self.space, samples=self.setup.samples, info=self.info, blocks=blocks, parallelisms=together
        )
        return choices + self._last_resort(choices, blocks)

    def _recomputable(self, blocks: Blocks) -> Blocks:
        """The blocks that may be recomputed without changing a gradient, each told how it may; masks follow them."""
        seen = self.foresight.watch(blocks)
        faithful = keep_faithful(self.setup, seen)
        self.foresight.follow(faithful)
        return faithful

    def _last_resort(self, choices: list[Candidate], blocks: Blocks) -> list[Candidate]:
        """Activations in host memory, where the smallest step should not fit otherwise."""
        if self.space.offload is not None or self.info.device.type != "cuda" or not blocks.names:
            return []
        needed = self.foresight.needed_bytes(least_demanding(choices))
        return [] if needed is None or needed <= self.allowance.cap_bytes else offloading(choices, blocks)

    def _needed_bytes(self, candidate: Candidate) -> int | None:
        if not self.foresight.has(candidate):
            self.setup.tell(Progress("predicting memory", candidate))
        return self.foresight.needed_bytes(candidate)

    def _evaluate(self, candidate: Candidate, *, deadline: float | None) -> Trial:
        """One trial, with the least recomputation that fits; the search knows it by the candidate that it proposed."""
        if deadline is not None and self.trials and time.monotonic() >= deadline:  # predicting took the rest
            return Trial(number=0, candidate=candidate, outcome="not_run", message="the time was up")
        cap, modes = self.allowance.cap_bytes, mask_modes(self.space)
        solved = self.foresight.solved(candidate, cap_bytes=cap, modes=modes)
        needed = self.foresight.needed_bytes(solved) if solved == candidate else None
        self.setup.tell(Progress("measuring memory", solved, needed, predicted=True, cap_bytes=cap))
        trial = run_trial(solved, self.setup, deadline=deadline, rival=best_trial(self.trials))
        self.leftovers.look(f"a trial of {solved}")
        return self.foresight.annotate(trial)

    def _remember(self, on_trial: Callable[[Trial], None] | None) -> Callable[[Trial], None]:
        """Trials are kept as they end, so that a lost device loses none of them."""

        def remember(trial: Trial) -> None:
            self.trials.append(trial)
            logger.info("trial %d: %s -> %s %s", trial.number, trial.candidate, trial.outcome, trial.message)
            if on_trial is not None:
                on_trial(trial)

        return remember

    def _decided(self, deadline: float | None) -> Trial | None:
        """The best trial, after the finals and as a whole step."""
        finals = Finals(self.trials, self.setup, deadline=deadline)
        best = finals.winner()
        self.trials = finals.trials
        self.notes += finals.notes
        return best

    def _raise_nothing_fits(self, choices: list[Candidate]) -> NoReturn:
        """The error for a search that found nothing: memory, if that is what it was, else what the trials said."""
        plan = self._plan(None)
        outcomes = {trial.outcome for trial in self.trials}
        if not outcomes & {"out_of_memory", "over_budget"}:
            messages = "; ".join(dict.fromkeys(trial.message for trial in self.trials if trial.message))
            raise StepError(
                f"None of {len(self.trials)} candidates could train: {messages or 'none was tried in time'}."
            )
        smallest = least_demanding(choices)
        need = measure_need(smallest, self.setup, available_bytes=self.info.total_bytes)
        seen = [t.peak_reserved_bytes for t in self.trials if t.peak_reserved_bytes is not None]
        peak = need.peak_reserved_bytes if need else max(seen, default=None)
        budget = format_bytes(self.allowance.budget_bytes)
        if need:
            required = need.peak_reserved_bytes + self.allowance.outside_bytes
            advice = (
                f"The smallest peak seen is {format_bytes(need.peak_reserved_bytes)}, of {smallest}: a budget of "
                f"{format_bytes(required)} or more would fit it."
            )
        else:
            advice = f"The smallest candidate, {smallest}, does not fit on the device at all: use a smaller model."
        raise InfeasibleError(
            f"Nothing fits into the budget of {budget} after {len(self.trials)} trial(s). {advice}"
            f"{self.foresight.bottleneck(smallest)}",
            budget_bytes=self.allowance.budget_bytes,
            smallest_peak_bytes=peak,
            plan=plan,
        )

    def _plan(self, best: Trial | None) -> Plan:
        if best is not None:
            self.setup.tell(Progress("predicting for the report", best.candidate))
        return Plan(
            target_batch=self.target_batch,
            world_size=self.setup.team.size,
            budget_bytes=self.allowance.budget_bytes,
            cap_bytes=self.allowance.cap_bytes,
            best_number=best.number if best else None,
            trials=tuple(self.trials),
            environment=describe_environment(
                self.setup.model,
                self.info,
                memory_source=self.setup.meter.source,
                optimizer=self.optimizer_name,
                seed=self.seed,
            ),
            notes=(*self.notes, *self.leftovers.notes, *self.foresight.notes(self.trials)),
            loss=loss_facts(self.setup.sample_batch, self.setup.layout, self.setup.model, **self.setup.loss_options),
            insight=self.foresight.insight(best.candidate, half=half_precision(self.info)) if best else None,
        )
