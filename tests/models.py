"""Small models that train, for tests of the whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


class ConvNet(nn.Module):
    """Convolutions with BatchNorm and dropout in two equal blocks: activations weigh more than weights."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(self._block(width) for _ in range(3))
        self.head = nn.Linear(width, 10)

    @staticmethod
    def _block(width: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class Wide(nn.Module):
    """A large weight and tiny activations: memory peaks in the optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 1500)
        self.second = nn.Linear(1500, 1500)
        self.third = nn.Linear(1500, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(F.relu(self.second(F.relu(self.first(x)))))


def image_batch(samples: int = 4, size: int = 32) -> Batch:
    """Images and classes, the same every time."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(samples, 3, size, size, generator=generator)
    return images, torch.randint(0, 10, (samples,), generator=generator)


def vector_batch(samples: int = 4) -> Batch:
    """Vectors and classes, the same every time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 8, generator=generator), torch.randint(0, 10, (samples,), generator=generator)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 3, batch: Batch | None = None
) -> list[float]:
    """The losses of a few plain training steps on random batches."""
    losses = []
    for _ in range(steps):
        images, targets = batch or (torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,)))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
