"""Plans kept in a folder: the same request on the same machine gets its plan back after one step that confirms it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autofit.environment import describe_environment
from autofit.errors import AutofitError, ConfigError
from autofit.fingerprint import describe_batch, describe_function, describe_model, describe_optimizer, fingerprint
from autofit.oom import headline
from autofit.plan import Environment, Plan
from autofit.preparation import Prepared
from autofit.trial import confirm_trial

logger = logging.getLogger(__name__)

# A budget of what is free is never twice the same; a plan for one further away than this is tuned anew.
BUDGET_TOLERANCE = 0.05


class PlanCache:
    """The place of one request's plan: a file in `folder`, named after the model and a hash of all that it depends on.

    That is the model's structure, shapes and code, the batch's shapes, loss, optimizer, `request`, device and versions.
    Raises ConfigError when `folder` is a file.
    """

    def __init__(self, folder: str | os.PathLike[str], ready: Prepared, request: Mapping[str, Any]) -> None:
        if Path(folder).is_file():
            raise ConfigError(f"cache={os.fspath(folder)!r} is a file. Pass a folder; it is made if it does not exist.")
        setup, optimizer = ready.setup, ready.setup.make_optimizer()
        self._ready = ready
        self._environment = describe_environment(
            setup.model,
            ready.info,
            memory_source=setup.meter.source,
            optimizer=type(optimizer).__name__,
            seed=int(request.get("seed", 0)),
        )
        options = setup.loss_options
        functions = (options.get("loss_fn"), options.get("compute_loss"), options.get("loss_weight"))
        key = fingerprint(
            {
                "model": describe_model(setup.model),
                "batch": describe_batch(setup.sample_batch),
                "batch_dims": repr(options.get("batch_dims")),
                "loss": [describe_function(function) for function in functions],
                "optimizer": describe_optimizer(optimizer),
                "request": dict(request),
                "environment": self._environment.model_dump(mode="json"),
            }
        )
        self.path = Path(folder, f"{type(setup.model).__name__}-{key}.json")

    def confirmed(self) -> Plan | None:
        """The plan, if there is one and its best candidate still runs at full size under today's cap.

        Its peak is then the larger of both runs, its times are those of the first. Anything else in the way of using
        it is logged, and None.
        """
        plan = self._load()
        if plan is None:
            return None
        trial = confirm_trial(plan.best, self._ready.setup)
        if not trial.feasible:
            logger.info("the plan in %s does not hold any more: %s", self.path, trial.message)
            return None
        trials = tuple(trial if other.number == trial.number else other for other in plan.trials)
        allowance = self._ready.allowance
        note = f"Taken from the cache ({self.path.name}) and confirmed by one whole step; times are those of then."
        return plan.model_copy(
            update={
                "trials": trials,
                "budget_bytes": allowance.budget_bytes,
                "cap_bytes": allowance.cap_bytes,
                "notes": (*plan.notes, note),
            }
        )

    def save(self, plan: Plan) -> None:
        """Keeps a plan. What cannot be written is logged: the plan itself is worth more than its copy."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            plan.save(self.path)
        except Exception as error:
            logger.warning("the plan was not kept in the cache: %s", headline(error))

    def _load(self) -> Plan | None:
        if not self.path.exists():
            return None
        try:
            plan = Plan.load(self.path)
        except AutofitError as error:
            logger.warning("the cache entry %s is ignored: %s", self.path, error)
            return None
        reason = self._foreign(plan)
        if reason:
            logger.info("the cache entry %s is ignored: %s", self.path, reason)
            return None
        return plan

    def _foreign(self, plan: Plan) -> str:
        """Why a plan is not one for here and now; empty when it is."""
        differing = [
            name
            for name in Environment.model_fields
            if getattr(plan.environment, name) != getattr(self._environment, name)
        ]
        if differing:
            return f"it is for another {', '.join(differing)}"
        if plan.best_number is None or not plan.best.feasible:
            return "it has no best trial"
        if plan.target_batch != self._ready.setup.samples:
            return f"it is for {plan.target_batch} samples per step"
        now = self._ready.allowance.budget_bytes
        if abs(plan.budget_bytes - now) > BUDGET_TOLERANCE * now:
            return f"its budget was {plan.budget_bytes} bytes, and it is {now} now"
        return ""
