"""A training script with a pre-flight step: tune once, keep the plan in a file, and check it from then on.

python examples/preflight.py --plan plan.json     tunes, saves, trains
python examples/preflight.py --plan plan.json     runs the plan's step once to see that it still holds, trains
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import autofit

TARGET_BATCH = 256


def make_model() -> nn.Module:
    """A small regression network."""
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))


def make_batch(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random vectors and the sum of their first eight elements."""
    inputs = torch.randn(samples, 64, generator=generator)
    return inputs, inputs[:, :8].sum(dim=1, keepdim=True)


def pre_flight(path: Path, model: nn.Module, sample: tuple[Tensor, Tensor], *, budget: str | None) -> autofit.Plan:
    """The saved plan if it still holds on this machine; else a new one, saved."""
    if path.exists():
        plan = autofit.Plan.load(path)
        try:
            check = plan.check(model, sample, loss_fn=nn.functional.mse_loss, budget=budget)
        except autofit.errors.PlanMismatchError as error:  # for another model or kind of device
            print(f"{path}: {error}")
        else:
            for difference in check.differences:
                print(f"{path}: {difference}")
            if check.holds and plan.target_batch == TARGET_BATCH:
                print(f"reusing {path}: {plan.candidate}")
                return plan
    plan = autofit.tune(model, sample, target_batch=TARGET_BATCH, loss_fn=nn.functional.mse_loss, budget=budget)
    plan.save(path)
    print(f"tuned {path}: {plan.candidate}")
    return plan


def main() -> None:
    """Pre-flight, then training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, default=Path("plan.json"))
    parser.add_argument("--budget", help="such as 8GiB; left out: what is free")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = make_model()
    plan = pre_flight(options.plan, model, make_batch(16, generator), budget=options.budget)

    model.to(plan.environment.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = plan.train_step(model, optimizer, loss_fn=nn.functional.mse_loss)
    for number in range(options.steps):
        result = step(make_batch(TARGET_BATCH, generator))
        print(f"step {number}: loss {result.loss.item():.3f}")


if __name__ == "__main__":
    main()
