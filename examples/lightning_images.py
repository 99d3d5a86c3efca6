"""An image model with Lightning: a callback tunes before fit, and the Trainer trains with the plan.

    python examples/lightning_images.py --budget 8MiB

Needs lightning; downloads nothing. The loader's batch of 128 stays the effective batch; the plan splits it.
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autofit.integrations.lightning import TuneBeforeFit
from autofit.units import format_bytes


class Classifier(pl.LightningModule):
    """A CNN that does not know of autofit."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(1024, 10),
        )
        self.losses: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch."""
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def on_train_batch_end(self, outputs, batch, batch_idx: int) -> None:  # type: ignore[no-untyped-def]
        """Keeps the losses of an epoch to print their mean."""
        self.losses.append(outputs["loss"].detach())

    def on_train_epoch_end(self) -> None:
        """One line per epoch."""
        mean = torch.stack(self.losses).mean().item() * self.trainer.accumulate_grad_batches  # Lightning divides by it
        print(f"step {self.global_step}: loss {mean:.3f}")
        self.losses.clear()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Its kind and settings are honoured while tuning."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def make_loader(samples: int, batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """Noise with a bright stripe; the class is where the stripe lies."""
    images, labels = torch.randn(samples, 3, 32, 32), torch.randint(10, (samples,))
    images[torch.arange(samples), :, labels * 3] += 2
    return DataLoader(TensorDataset(images, labels), batch_size=batch_size, shuffle=True)


def main() -> None:
    """Fits; the callback does the rest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-batch", type=int, default=128)
    parser.add_argument("--budget", help="such as 8GiB; left out: what is free")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    torch.manual_seed(0)
    callback = TuneBeforeFit(budget=options.budget)
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), make_loader(options.target_batch * 4, options.target_batch))
    plan = callback.plan
    assert plan is not None
    print(f"{plan.candidate}: {format_bytes(plan.best.peak_reserved_bytes or 0)} of {format_bytes(plan.cap_bytes)}")


if __name__ == "__main__":
    main()
