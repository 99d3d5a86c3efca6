"""A six-convolution CNN on images of CIFAR-10's size, trained at a batch that the memory budget does not hold at once.

    python examples/cifar_cnn.py --target-batch 256

First the plain step, the whole batch at once in float32, and what recomputing saves and costs. Then half of that as the
budget: `tune` finds the fastest way to train the same batch in it. Then some steps of training with the plan.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import autofit
from autofit.predict import Predictor
from autofit.units import format_bytes


def make_model() -> nn.Module:
    """Three stages of two convolutions and a pooling, and a classifier for ten classes."""
    layers: list[nn.Module] = []
    for width_in, width in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(width_in, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, 10))


def make_batch(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noise with a bright stripe; the class is where the stripe lies."""
    images = torch.randn(samples, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (samples,), generator=generator)
    images[torch.arange(samples), :, labels * 3] += 2
    return images, labels


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
    """Measures the plain step, tunes within half its memory, and trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = make_model()
    sample = make_batch(8, generator)

    plain = autofit.SearchSpace(micro_batch_size=options.target_batch, precision="float32", checkpointing="none")
    before = autofit.tune(model, sample, target_batch=options.target_batch, space=plain)
    peak_before = before.best.peak_reserved_bytes or 0
    print("the whole batch at once, by what is recomputed")
    show_checkpointing(model, sample, options.target_batch, peak_before // 2)
    outside = before.budget_bytes - before.cap_bytes  # the budget is the process's: a CUDA context counts too
    print(f"before  {before.candidate}: {format_bytes(peak_before)}")

    plan = autofit.tune(model, sample, target_batch=options.target_batch, budget=outside + peak_before // 2)
    print(f"after   {plan.candidate}: {format_bytes(plan.best.peak_reserved_bytes or 0)}")
    print(f"allowed {format_bytes(plan.cap_bytes)}; memory is {plan.environment.memory_source}")

    device = plan.environment.device
    model.to(device)
    step = plan.train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for number in range(options.steps):
        result = step(make_batch(options.target_batch, generator))
        print(f"step {number}: loss {result.loss.item():.3f}, micro-batches {result.micro_batches}")


if __name__ == "__main__":
    main()
