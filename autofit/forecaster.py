"""`forecast()`: what would fit on a GPU that is not here, and in which order of speed. Nothing runs."""

from __future__ import annotations

import math
import time
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Literal, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.budget import Budget, predicted_budget
from autofit.candidate import NUMERIC_CHANGE, Candidate, Checkpointing, CheckpointingMode, SearchSpace
from autofit.checks import check_call
from autofit.device import DeviceInfo, half_precision
from autofit.environment import describe_environment
from autofit.errors import InfeasibleError
from autofit.gpus import find_gpu
from autofit.hindsight import allowed_seconds, insight
from autofit.memory import Peaks
from autofit.optimizers import optimizer_factory
from autofit.plan import TIE_SHARE, Plan, Trial
from autofit.predict import MemoryPrediction, UntraceableError
from autofit.predict.scratch import CUDA_CONTEXT_BYTES
from autofit.predict.step_predictor import StepPredictor
from autofit.probe import describe_blocks
from autofit.space import candidates, mask_modes, offloading
from autofit.step.blocks import Blocks, discover_blocks
from autofit.units import format_bytes, format_seconds

# What it may cost to run so near the budget that the allocator has to give back what it caches, as the search assumes.
CROWDED_COST = 0.05
MEMORY_SOURCE = "predicted: nothing was run"
BLIND_SPOTS = (
    "Nothing was run: memory and speed are predicted from the step on tensors without values. Before you train, let "
    "tune() try it on the GPU itself.",
    "Predicted memory does not contain what cuDNN takes inside a convolution, nor what the memory's fragments of "
    "earlier work cost.",
    "Predicted speed is a roofline of the GPU's published rates, to order candidates by: it knows nothing of the data "
    "loader, or of how well a kernel suits its shapes.",
)


def forecast(
    model: nn.Module,
    sample_batch: Any,
    *,
    target_batch: int,
    gpu: str,
    budget: str | int | float | None = None,
    loss_fn: Callable[..., Any] | None = None,
    compute_loss: Callable[..., Any] | None = None,
    loss_weight: Callable[[Any], Any] | Literal["samples", "sum"] | None = None,
    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    space: SearchSpace | None = None,
    batch_dims: Any = None,
) -> Plan:
    """Predicts which training steps of exactly `target_batch` samples fit on a GPU that need not be here.

    `gpu` names one of the catalogue, `autofit.gpus`. The other arguments are those of `tune`; the default `budget` is
    all of the GPU's memory less a small reserve. The model may lie on the CPU or on `meta`, and is not touched.

    The plan's trials are best first. Those that fit have the outcome `predicted`, a predicted peak, and in
    `samples_per_second` a speed from a roofline: good to order them by, and no measurement. After them, for each
    precision and checkpointing, comes the smallest micro-batch that does not fit, as `over_budget`.

    Raises ConfigError for a GPU that is not in the catalogue and for arguments that cannot be meant, InfeasibleError
    when nothing fits, `autofit.predict.UntraceableError` when the step needs values or a device whatever the precision.
    """
    forecaster = Forecaster(
        model,
        sample_batch,
        gpu=gpu,
        loss_fn=loss_fn,
        compute_loss=compute_loss,
        loss_weight=loss_weight,
        optimizer=optimizer,
        batch_dims=batch_dims,
    )
    return forecaster.plan(target_batch=target_batch, budget=budget, space=space)


class Forecaster:
    """Forecasts of one model, batch, loss and optimizer on one GPU of the catalogue; traces are kept between calls.

    Arguments as in `forecast`; `options` are those of the loss and `batch_dims`.
    """

    def __init__(self, model: nn.Module, sample_batch: Any, *, gpu: str, optimizer: Any = None, **options: Any) -> None:
        check_call(model, target_batch=1, max_trials=None, timeout=None, space=None)
        known = find_gpu(gpu)
        self._model = model
        self._info = DeviceInfo(torch.device("cuda"), known.name, known.total_bytes, known.capability)
        self._optimizer_name = type(optimizer_factory(optimizer, model)()).__name__
        self._predictor = StepPredictor(model, sample_batch, gpu=gpu, optimizer=optimizer, **options)

    def plan(
        self, *, target_batch: int, budget: str | int | float | None = None, space: SearchSpace | None = None
    ) -> Plan:
        """The forecast for a target batch; see `forecast`."""
        began = time.monotonic()
        check_call(self._model, target_batch=target_batch, max_trials=None, timeout=None, space=space)
        allowance = predicted_budget(budget, info=self._info, context_bytes=CUDA_CONTEXT_BYTES)
        space = space or SearchSpace()
        blocks = self._blocks(space)
        choices = candidates(space, samples=target_batch, info=self._info, blocks=blocks)
        self._predictor.follow(blocks)
        outlook = _Outlook(
            self._predictor, samples=target_batch, cap_bytes=allowance.cap_bytes, modes=mask_modes(space)
        )
        trials = outlook.trials(choices)
        if trials[0].outcome != "predicted" and space.offload is None and blocks.names:
            trials = outlook.trials(offloading(choices, blocks)) + trials
        plan = Plan(
            target_batch=target_batch,
            budget_bytes=allowance.budget_bytes,
            cap_bytes=allowance.cap_bytes,
            best_number=0 if trials[0].outcome == "predicted" else None,
            trials=tuple(trial.model_copy(update={"number": number}) for number, trial in enumerate(trials)),
            environment=describe_environment(
                self._model, self._info, memory_source=MEMORY_SOURCE, optimizer=self._optimizer_name, seed=0
            ),
            notes=(allowance.note, *describe_blocks(blocks), *outlook.notes, *BLIND_SPOTS),
        )
        if plan.best_number is None:
            least = self._predictor.predict(plan.trials[0].candidate, samples=target_batch)
            _raise_nothing_fits(plan, allowance, least)
        return self._looked_back(plan, blocks, took=time.monotonic() - began)

    def _looked_back(self, plan: Plan, blocks: Blocks, *, took: float) -> Plan:
        """The plan with what is to be said of its step, after a forecast that `took` so many seconds."""
        seen = insight(
            self._predictor,
            plan.candidate,
            samples=plan.target_batch,
            blocks=blocks,
            half=half_precision(self._info),
            seconds=allowed_seconds(took),
        )
        return plan.model_copy(update={"insight": seen})

    def memory(self, plan: Plan) -> MemoryPrediction:
        """What the best candidate of a plan of this forecaster needs, and what for."""
        return self._predictor.predict(plan.candidate, samples=plan.target_batch)

    def _blocks(self, space: SearchSpace) -> Blocks:
        if space.checkpointing == ("none",):
            return Blocks((), "checkpointing was not asked for")
        return self._predictor.observed_blocks(discover_blocks(self._model, patterns=space.checkpoint_blocks))


class _Outlook:
    """What is predicted of the candidates of one target batch."""

    def __init__(
        self, predictor: StepPredictor, *, samples: int, cap_bytes: int, modes: tuple[CheckpointingMode, ...]
    ) -> None:
        self._predictor = predictor
        self._samples = samples
        self._cap = cap_bytes
        self._modes = modes
        self._untraceable: dict[str, UntraceableError] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Which precisions and checkpointing are left out because their step cannot be traced."""
        return tuple(f"Not predicted: {line}. {error}" for line, error in self._untraceable.items())

    def trials(self, choices: Sequence[Candidate]) -> list[Trial]:
        """Those that fit, best first, and the first of each precision and checkpointing that does not.

        A precision and checkpointing that cannot be traced is left out; raises UntraceableError where none can.
        """
        fitting: list[Candidate] = []
        beyond: list[Candidate] = []
        for line in _lines(choices):
            try:
                # Memory grows along a line.
                count = bisect(line, False, key=lambda candidate: not self._peaks(candidate).fits)
            except UntraceableError as error:
                self._untraceable[f"{line[0].precision}, checkpointing {line[0].checkpointing}"] = error
                continue
            fitting += self._with_masks(line[:count], fitting)
            beyond += line[count : count + 1]
        if not fitting and not beyond:
            raise next(iter(self._untraceable.values()))
        predicted = [self._predicted(candidate) for candidate in sorted(fitting, key=self._merit)]
        return [*predicted, *sorted(map(self._over_budget, beyond), key=lambda t: t.predicted_peak_bytes or 0)]

    def _with_masks(self, line: Sequence[Candidate], fitting: Sequence[Candidate]) -> list[Candidate]:
        """The line, where that could be the fastest plan with as little recomputation as fits.

        Without any the same split would be faster still: where even that would not beat a plain candidate that fits, or
        is one, the question need not be asked.
        """
        if (line and line[0].checkpointing.mode == "none") or not self._modes:
            return list(line)
        plain = [candidate for candidate in fitting if candidate.checkpointing.mode == "none"]
        best = min(map(self._seconds, plain), default=math.inf)
        result = []
        for candidate in line:
            bound = candidate.model_copy(update={"checkpointing": Checkpointing()})
            if bound not in plain and self._seconds(bound) < best * (1 - TIE_SHARE):
                modes = {*self._modes, candidate.checkpointing.mode}
                found = self._predictor.solve(candidate, samples=self._samples, cap_bytes=self._cap, modes=modes)
                candidate = found or candidate
            result.append(candidate)
        return result

    def _predicted(self, candidate: Candidate) -> Trial:
        seconds, peaks = self._seconds(candidate), self._peaks(candidate)
        crowded = "; so near the budget that the allocator must give back what it caches" if peaks.retries else ""
        return Trial(
            number=0,
            candidate=candidate,
            outcome="predicted",
            predicted_peak_bytes=peaks.peak_reserved_bytes,
            samples_per_second=self._samples / seconds,
            message=f"predicted: {format_seconds(seconds)} per optimizer step, not measured{crowded}",
        )

    def _over_budget(self, candidate: Candidate) -> Trial:
        needed = self._predictor.needed_bytes(candidate, samples=self._samples)
        return Trial(
            number=0,
            candidate=candidate,
            outcome="over_budget",
            predicted_peak_bytes=needed,
            message=f"predicted to need {format_bytes(needed)}; not run",
        )

    def _merit(self, candidate: Candidate) -> tuple[float, int, int]:
        """Smallest is best: seconds, in steps of what counts as a tie; then bytes, then numeric change."""
        peaks = self._peaks(candidate)
        seconds = self._seconds(candidate) * (1 + CROWDED_COST if peaks.retries else 1)
        tie = round(math.log(seconds) / TIE_SHARE)
        return tie, peaks.peak_reserved_bytes, NUMERIC_CHANGE[candidate.precision]

    def _peaks(self, candidate: Candidate) -> Peaks:
        return self._predictor.peaks(candidate, samples=self._samples, cap_bytes=self._cap)

    def _seconds(self, candidate: Candidate) -> float:
        return self._predictor.step_seconds(candidate, samples=self._samples)


def _lines(choices: Sequence[Candidate]) -> Iterator[list[Candidate]]:
    """The candidates of each precision and checkpointing, by micro-batch; plain ones come first."""

    def line(candidate: Candidate) -> tuple[int, int]:
        mode = candidate.checkpointing.mode
        return ("none", mode, "offload").index(mode), NUMERIC_CHANGE[candidate.precision]

    for _, group in groupby(sorted(choices, key=lambda c: (line(c), c.micro_batch_size)), key=line):
        yield list(group)


def _raise_nothing_fits(plan: Plan, allowance: Budget, least: MemoryPrediction) -> NoReturn:
    smallest = plan.trials[0]
    needed = smallest.predicted_peak_bytes or 0
    name = plan.environment.device_name
    raise InfeasibleError(
        f"Nothing is predicted to fit into {format_bytes(allowance.budget_bytes)} on a {name}. The least, "
        f"{smallest.candidate}, is predicted to need {format_bytes(needed)} and the CUDA context "
        f"{format_bytes(allowance.outside_bytes)}. {least.bottleneck} "
        "Choose a larger GPU, a smaller model, or shorter samples.",
        budget_bytes=allowance.budget_bytes,
        smallest_peak_bytes=needed,
        plan=plan,
    )
