"""Fine-tuning a small transformer with the Hugging Face Trainer, its arguments from a plan.

    python examples/hf_trainer.py --target-batch 32 --budget 16MiB

Needs transformers and accelerate; downloads nothing. The texts are generated: one class uses the lower half of the
vocabulary, the other the upper.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

import autofit
from autofit.integrations.hugging_face import PlanCallback
from autofit.units import format_bytes

VOCABULARY = 200


class Texts(Dataset[dict[str, Tensor]]):
    """Token sequences of two classes."""

    def __init__(self, samples: int, *, length: int = 32) -> None:
        self.labels = torch.randint(2, (samples,))
        self.tokens = torch.randint(VOCABULARY // 2, (samples, length)) + self.labels[:, None] * (VOCABULARY // 2)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int | slice) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


class PrintLosses(TrainerCallback):
    """One line per optimizer step."""

    def on_log(self, args, state, control, logs=None, **others) -> None:  # type: ignore[no-untyped-def]
        """The loss as the Trainer logs it."""
        if logs and "loss" in logs:
            print(f"step {state.global_step}: loss {float(logs['loss']):.3f}")


def main() -> None:
    """Tunes, then lets the Trainer train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-batch", type=int, default=32)
    parser.add_argument("--budget", help="such as 8GiB; left out: what is free")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256
    )
    model = BertForSequenceClassification(config)
    texts = Texts(options.target_batch * options.steps)

    plan = autofit.tune(
        model,
        texts[:4],
        target_batch=options.target_batch,
        budget=options.budget,
        space=autofit.SearchSpace(even_split=True),  # the Trainer takes one batch size
    )
    print(f"{plan.candidate}: {format_bytes(plan.best.peak_reserved_bytes or 0)} of {format_bytes(plan.cap_bytes)}")

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=options.steps,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **plan.to_training_arguments(),
        )
        callbacks = [PlanCallback(plan, sample_batch=texts[:4]), PrintLosses()]
        Trainer(model=model, args=arguments, train_dataset=texts, callbacks=callbacks).train()


if __name__ == "__main__":
    main()
