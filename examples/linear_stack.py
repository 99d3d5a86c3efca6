"""Twenty Linear layers, where activations take most of the memory: what each way of saving them costs in time.

    python examples/linear_stack.py --target-batch 2048

Prints every trial within a third of the memory that the plain full-batch step takes, then trains with the fastest.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict

import torch
from torch import Tensor, nn

import autofit
from autofit.predict import Predictor
from autofit.units import format_bytes

LAYERS = 20
WIDTH = 128


def make_model() -> nn.Module:
    """A stack of equal blocks, so that checkpointing has something to recompute."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    for linear, _ in blocks:
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")  # else the signal fades over twenty layers
    return nn.Sequential(OrderedDict(blocks=nn.Sequential(*blocks), head=nn.Linear(WIDTH, 1)))


def make_batch(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random vectors; the target is the mean of the first half."""
    inputs = torch.randn(samples, WIDTH, generator=generator)
    return inputs, inputs[:, : WIDTH // 2].mean(dim=1, keepdim=True) * 8


def show(trial: autofit.Trial) -> None:
    """One trial as a line: what was tried, how fast it was, and the memory it took, or why it was not run."""
    peak, rate = trial.peak_reserved_bytes, trial.samples_per_second
    facts = [format_bytes(peak) if peak else "", f"{rate:,.0f} samples/s" if rate else "", trial.outcome, trial.message]
    print(f"  {trial.candidate}: {', '.join(filter(None, facts))}")


def show_checkpointing(model: nn.Module, sample: tuple[Tensor, Tensor], batch: int, cap_bytes: int) -> None:
    """Memory and speed of the whole batch at once in each mode, and the largest batch that fits under `cap_bytes`."""
    predictor = Predictor(model, sample, device="cpu")
    for mode in ("none", "full", "selective"):
        space = autofit.SearchSpace(micro_batch_size=batch, precision="float32", checkpointing=mode)
        best = autofit.tune(model, sample, target_batch=batch, space=space).best
        fits, fails = 0, 2**20
        while fails - fits > 1:
            middle = (fits + fails) // 2
            candidate = best.candidate.model_copy(update={"micro_batch_size": middle})
            needed = predictor.predict(candidate).fit_threshold_bytes
            fits, fails = (middle, fails) if needed <= cap_bytes else (fits, middle)
        peak, rate = format_bytes(best.peak_reserved_bytes or 0), best.samples_per_second or 0
        print(
            f"  {mode:<9} {peak}, {rate:,.0f} samples/s; up to {fits} samples at once under {format_bytes(cap_bytes)}"
        )


def main() -> None:
    """Measures the plain step, tunes within a third of its memory, and trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = make_model()
    sample = make_batch(8, generator)

    print("the plain step")
    plain = autofit.SearchSpace(micro_batch_size=options.target_batch, precision="float32", checkpointing="none")
    before = autofit.tune(model, sample, target_batch=options.target_batch, space=plain, on_trial=show)
    peak_before = before.best.peak_reserved_bytes or 0
    print("the whole batch at once, by what is recomputed")
    show_checkpointing(model, sample, options.target_batch, peak_before // 2)
    outside = before.budget_bytes - before.cap_bytes  # the budget is the process's: a CUDA context counts too

    print("within a third of its memory")
    plan = autofit.tune(
        model, sample, target_batch=options.target_batch, budget=outside + peak_before // 3, on_trial=show
    )
    peak_after = plan.best.peak_reserved_bytes or 0
    print(f"{format_bytes(peak_before)} before, {format_bytes(peak_after)} after: {plan.candidate}")

    model.to(plan.environment.device)
    step = plan.train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for number in range(options.steps):
        result = step(make_batch(options.target_batch, generator))
        print(f"step {number}: loss {result.loss.item():.3f}")


if __name__ == "__main__":
    main()
