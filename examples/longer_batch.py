"""A plain loop in which a batch suddenly is twice as long, runs out of memory, and is trained all the same.

    python examples/longer_batch.py

Tunes on short sequences within a budget, trains, and meets long ones in the middle. The step that runs out of memory is
run again in smaller micro-batches with the same gradient; short batches keep the size of the plan. On a GPU the device
itself runs out. On a CPU the budget is enforced by counting tensors as a CUDA device would hold them, so that the
example does the same everywhere.
"""

from __future__ import annotations

import argparse
import logging

import torch
from torch import Tensor, nn

import autofit
from autofit.memory import meter_for
from autofit.units import format_bytes

VOCABULARY, WIDTH, LENGTH = 100, 64, 64


class Tagger(nn.Module):
    """Names the token at each position; a transformer of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits as [samples, classes, positions]."""
        return self.head(self.layers(self.embed(tokens))).transpose(1, 2)


def make_batch(samples: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences of ten tokens out of the vocabulary, to be named."""
    tokens = torch.randint(10, (samples, length), generator=generator)
    return tokens, tokens


def main() -> None:
    """Tunes on short batches, then trains on short and long ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-batch", type=int, default=16)
    parser.add_argument("--budget", default="32MiB")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.WARNING)

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Tagger()
    plan = autofit.tune(
        model, make_batch(4, LENGTH, generator), target_batch=options.target_batch, budget=options.budget
    )
    print(f"{plan.candidate}: {format_bytes(plan.best.peak_reserved_bytes or 0)} of {format_bytes(plan.cap_bytes)}")

    device = torch.device(plan.environment.device)
    model.to(device)
    step = plan.train_step(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    meter = meter_for(device)
    with meter.capped(plan.cap_bytes), meter.metered(cap_bytes=plan.cap_bytes, resident=model.parameters()):
        for number in range(options.steps):
            length = LENGTH if number % 4 != 2 else 2 * LENGTH
            result = step(make_batch(options.target_batch, length, generator))
            print(
                f"step {number}: loss {result.loss.item():.3f}, length {length}, micro-batches {result.micro_batches}"
            )
    print(f"ran out of memory {len(step.oom_events)} times, lost no step")


if __name__ == "__main__":
    main()
