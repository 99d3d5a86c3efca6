"""What comes out: trials, the plan, and the environment that they were measured in. JSON only, never pickle."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args

from pydantic import Field, ValidationError, model_validator

from autofit.candidate import NUMERIC_CHANGE, Candidate, FrozenModel, Printable, describe_validation
from autofit.errors import ConfigError, PlanMismatchError
from autofit.insight import Insight
from autofit.loss_facts import Callables, LossFacts
from autofit.recipe import to_python

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from autofit.preflight import CheckOptions, PlanCheck
    from autofit.step import TrainStep

SCHEMA_VERSION: Literal[1] = 1

Outcome = Literal["feasible", "over_budget", "out_of_memory", "invalid", "unstable", "slower", "predicted", "not_run"]


class Seconds(FrozenModel):
    """Repeated measurements of one duration: the raw samples, and their median and interquartile range."""

    median: float
    iqr: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Iterable[float]) -> Seconds:
        """Statistics of at least one sample in seconds."""
        values = tuple(samples)
        quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        return cls(median=statistics.median(values), iqr=quartiles[2] - quartiles[0], samples=values)


class Trial(FrozenModel):
    """One candidate, tried. What was not measured is None.

    `step_seconds` is one whole optimizer step, composed as accumulation_steps × micro-step + optimizer step from
    micro-steps and optimizer steps timed apart; in the finals, the steps that were run in turn with others.
    `peak_reserved_bytes` is the figure that is held against the allocator cap.
    """

    number: int
    candidate: Candidate
    outcome: Outcome
    predicted_peak_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    alloc_retries: int | None = None
    micro_step_seconds: float | None = None
    optimizer_seconds: float | None = None
    step_seconds: Seconds | None = None
    samples_per_second: float | None = None
    message: Printable = ""

    @property
    def feasible(self) -> bool:
        """Ran at full size under the allocator cap."""
        return self.outcome == "feasible"

    @property
    def was_run(self) -> bool:
        """Whether anything of it ran: what is predicted not to fit is written down and not run."""
        foreseen = self.outcome == "over_budget" and self.peak_reserved_bytes is None
        return not foreseen and self.outcome not in ("predicted", "not_run")

    @property
    def known_peak_bytes(self) -> int | None:
        """The measured peak, or else the predicted one."""
        return self.peak_reserved_bytes if self.peak_reserved_bytes is not None else self.predicted_peak_bytes


class Environment(FrozenModel):
    """Where and for what the trials were measured: what decides whether a plan still holds elsewhere."""

    autofit_version: Printable
    torch_version: Printable
    python_version: Printable
    platform: Printable
    device: Printable
    device_name: Printable
    device_total_bytes: int
    compute_capability: Printable | None = None
    cuda_version: Printable | None = None
    threads: int | None = None
    memory_source: Printable
    model: Printable
    parameters: int
    trainable_parameters: int
    optimizer: Printable
    seed: int


class Plan(FrozenModel):
    """All trials, the best of them, and the environment they were measured in."""

    schema_version: Literal[1] = SCHEMA_VERSION
    target_batch: int = Field(ge=1)
    world_size: int = Field(default=1, ge=1)
    budget_bytes: int = Field(ge=0)
    cap_bytes: int = Field(ge=0)
    best_number: int | None
    trials: tuple[Trial, ...]
    environment: Environment
    notes: tuple[Printable, ...] = ()
    loss: LossFacts | None = None
    insight: Insight | None = None

    @model_validator(mode="after")
    def _best_is_a_trial(self) -> Plan:
        numbers = [trial.number for trial in self.trials]
        if len(set(numbers)) != len(numbers):
            raise ValueError("two trials have the same number")
        if self.best_number is not None and self.best_number not in numbers:
            raise ValueError(f"best_number {self.best_number} is none of the trials {numbers}")
        return self

    @model_validator(mode="after")
    def _trials_are_what_they_say(self) -> Plan:
        for trial in self.trials:
            peak = trial.peak_reserved_bytes
            if trial.feasible and peak is not None and peak > self.cap_bytes:
                raise ValueError(f"trial {trial.number} is feasible, and its peak {peak} is above the cap")
            if trial.number == self.best_number and trial.outcome not in ("feasible", "predicted"):
                raise ValueError(f"best_number {trial.number} is a trial that is {trial.outcome}")
        return self

    @property
    def best(self) -> Trial:
        """The trial to train with; raises ConfigError when the plan has none."""
        for trial in self.trials:
            if trial.number == self.best_number:
                return trial
        raise ConfigError(
            "This plan has no best trial: nothing that was tried fits. See plan.trials for what each needed."
        )

    @property
    def candidate(self) -> Candidate:
        """The best trial's candidate."""
        return self.best.candidate

    def train_step(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        loss_fn: Callable[..., Any] | None = None,
        compute_loss: Callable[..., Any] | None = None,
        loss_weight: Callable[[Any], Any] | Literal["samples", "sum"] | None = None,
        batch_dims: Any = None,
        max_grad_norm: float | None = None,
    ) -> TrainStep:
        """The `TrainStep` that trains as the best trial did: `for batch in loader: result = step(batch)`.

        `loss_fn`, `compute_loss` and `loss_weight` have to be passed again if `tune` was given them, else a ConfigError
        says so; `batch_dims` is remembered.
        """
        from autofit.step import TrainStep  # a door upward: data hands out the behaviour that it describes

        passed = {"loss_fn": loss_fn, "compute_loss": compute_loss, "loss_weight": loss_weight}
        self._check_callables(passed, "train_step")
        facts = self.loss or LossFacts()
        return TrainStep(
            model,
            optimizer,
            self.candidate,
            loss_fn=loss_fn,
            compute_loss=compute_loss,
            loss_weight=facts.loss_weight if loss_weight is None else loss_weight,
            batch_dims=facts.batch_dims if batch_dims is None else batch_dims,
            max_grad_norm=max_grad_norm,
        )

    def _check_callables(self, passed: Mapping[str, Any], method: str) -> None:
        """A file cannot hold functions: what `tune` was given, training has to be given again."""
        missing = [name for name in (self.loss.given if self.loss else ()) if passed[name] is None]
        if missing and not (missing == ["loss_fn"] and passed["compute_loss"] is not None):
            named = ", ".join(f"{name}=" for name in missing)
            raise ConfigError(
                f"This plan was tuned with {named} and {method} was not given it, so it would run another loss. "
                f"Pass the same {named}"
            )

    def check(self, model: nn.Module, sample_batch: Any, **options: Unpack[CheckOptions]) -> PlanCheck:
        """Runs the best trial's step once more, here, under the plan's budget: does the plan still hold?

        Options as of `autofit.tune`: the loss and `batch_dims` as for `train_step`, `optimizer`, `device`, `budget`.
        Raises PlanMismatchError when the plan is for another model or kind of device; see `autofit.preflight`.
        """
        from autofit.preflight import check_plan

        self._check_callables({name: options.get(name) for name in get_args(Callables)}, "check")
        facts = self.loss or LossFacts()
        if options.get("loss_weight") is None:
            options["loss_weight"] = facts.loss_weight
        if options.get("batch_dims") is None:
            options["batch_dims"] = facts.batch_dims
        return check_plan(self, model, sample_batch, **options)

    def to_python(self) -> str:
        """The best trial's step as plain PyTorch code that imports no autofit.

        Its `train_step` takes the callables that `tune` was given. Raises ConfigError for batches that are lists of
        samples.
        """
        return to_python(self.candidate, target_batch=self.target_batch, facts=self.loss)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Writes the report's pictures into one file, of the kind that its ending names: .png, .pdf, .svg.

        Raises ConfigError without matplotlib (`torch-autofit[plot]`), and where nothing can be written.
        """
        from autofit.report.plot import plot

        plot(self, path)

    def to_training_arguments(self) -> dict[str, Any]:
        """Arguments of Hugging Face's `TrainingArguments`: `TrainingArguments(folder, **plan.to_training_arguments())`.

        Raises ConfigError when the plan's micro-batches are not all of one size; see `autofit.integrations`.
        """
        from autofit.integrations.hugging_face import training_arguments

        return training_arguments(self)

    def to_json(self) -> str:
        """The plan as one JSON document; what was not measured is null."""
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Reads `to_json`'s document.

        Raises PlanMismatchError for another schema version, ConfigError for anything that is not a plan.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            version = next((e["input"] for e in error.errors() if e["loc"] == ("schema_version",)), None)
            if version is not None:
                raise PlanMismatchError(
                    f"The plan has schema version {version!r}; this autofit reads {SCHEMA_VERSION}. "
                    "Tune again, or use the autofit that wrote it.",
                    differences=(f"schema_version: plan has {version!r}, here is {SCHEMA_VERSION}",),
                ) from None
            raise ConfigError(describe_validation(error, "The plan")) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; an existing file is replaced whole or not at all."""
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        try:
            with temporary.open("x", encoding="utf-8") as file:
                file.write(self.to_json())
            temporary.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):  # what went wrong says more than that this does too
                temporary.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan that `save` wrote. Raises ConfigError where there is no such file, and as `from_json` does."""
        if not isinstance(path, (str, os.PathLike)):
            raise ConfigError(f"Plan.load takes the path of a file, got {path!r}.")
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"There is no plan to read at '{os.fspath(path)}': {error.strerror}.") from error
        return cls.from_json(text)


# Differences below this share of the step are noise even where the quartiles happen to agree.
TIE_SHARE = 0.01


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """The feasible trial with the most samples per second; a difference inside the noise is a tie.

    A tie goes to less memory, then to fewer numeric changes. None when no trial is feasible.
    """
    rated = [
        (trial, trial.samples_per_second) for trial in trials if trial.feasible and trial.samples_per_second is not None
    ]
    if not rated:
        return None
    fastest, rate = max(rated, key=lambda pair: pair[1])
    tied = [trial for trial, other in rated if rate - other <= rate * max(TIE_SHARE, _noise(fastest), _noise(trial))]
    return min(tied, key=lambda t: (t.peak_reserved_bytes or 0, NUMERIC_CHANGE[t.candidate.precision], t.number))


def _noise(trial: Trial) -> float:
    """How far the medians of two trials like this one differ by chance, as a share; at most 5 %.

    The standard error of a median is 1.25 σ / √n, σ being the interquartile range / 1.35; √2 of it for a difference.
    """
    seconds = trial.step_seconds
    if not seconds or not seconds.median:
        return 0.0
    return min(1.3 * seconds.iqr / seconds.median / math.sqrt(len(seconds.samples)), 0.05)
