"""Plans for frameworks that know one batch size and a number of batches to accumulate."""

from __future__ import annotations

from autofit.errors import ConfigError
from autofit.plan import Plan, Trial


def even_split(plan: Plan, framework: str) -> tuple[int, int]:
    """The plan's micro-batch and accumulation steps; raises ConfigError when its micro-batches are not all equal."""
    candidate, (samples, rest) = plan.candidate, divmod(plan.target_batch, plan.world_size)
    if rest:
        raise ConfigError(
            f"{plan.target_batch} samples on {plan.world_size} ranks are not the same number on each, and {framework} "
            "takes one batch size. Tune for a target_batch that the ranks divide, or train with plan.train_step."
        )
    if samples % candidate.accumulation_steps == 0:
        return candidate.micro_batch_size, candidate.accumulation_steps
    sizes = " and ".join(str(size) for size in sorted(set(candidate.split(samples)), reverse=True))
    raise ConfigError(
        f"The plan's micro-batches are of {sizes} samples ({samples} in {candidate.accumulation_steps} steps), and "
        f"{framework} takes one batch size. Tune with space=autofit.SearchSpace(even_split=True), or --even-split; or "
        f"train with plan.train_step, which runs any split.{_even_one(plan)}"
    )


def _even_one(plan: Plan) -> str:
    """The fastest trial of this plan that would do, if there is one."""
    samples = plan.target_batch // plan.world_size
    even = [t for t in plan.trials if t.feasible and samples % t.candidate.accumulation_steps == 0]
    best: Trial | None = max(even, key=lambda trial: trial.samples_per_second or 0.0, default=None)
    if best is None or not best.samples_per_second or not plan.best.samples_per_second:
        return ""
    slower = 1 - best.samples_per_second / plan.best.samples_per_second
    return (
        f" In this plan trial {best.number}, {best.candidate}, is even and {max(slower, 0):.0%} slower: "
        f"plan.model_copy(update={{'best_number': {best.number}}}) is the plan with it."
    )
