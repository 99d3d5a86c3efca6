"""A BERT classifier from a small configuration: batches are dicts, and the loss is the model's own.

    python examples/bert_classifier.py --target-batch 32 --budget 16MiB

Needs transformers; downloads nothing.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

import autofit
from autofit.units import format_bytes

VOCABULARY = 200


def make_model() -> BertForSequenceClassification:
    """Two layers of width 64, two classes."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def make_batch(samples: int, generator: torch.Generator, *, length: int = 32) -> dict[str, Tensor]:
    """Token sequences of two classes: one uses the lower half of the vocabulary, the other the upper."""
    labels = torch.randint(2, (samples,), generator=generator)
    tokens = torch.randint(VOCABULARY // 2, (samples, length), generator=generator)
    tokens += labels[:, None] * (VOCABULARY // 2)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def main() -> None:
    """Tunes within the budget, and trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-batch", type=int, default=32)
    parser.add_argument("--budget", help="such as 8GiB; left out: what is free")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    plan = autofit.tune(
        model,
        make_batch(4, generator),
        target_batch=options.target_batch,
        optimizer=optimizer,  # its kind and settings are honoured, the object is not touched
        budget=options.budget,
    )
    print(f"{plan.candidate}: {format_bytes(plan.best.peak_reserved_bytes or 0)} of {format_bytes(plan.cap_bytes)}")

    model.to(plan.environment.device)
    step = plan.train_step(model, optimizer, max_grad_norm=1.0)
    for number in range(options.steps):
        result = step(make_batch(options.target_batch, generator))
        print(f"step {number}: loss {result.loss.item():.3f}")


if __name__ == "__main__":
    main()
