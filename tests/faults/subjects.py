"""Tiny trainings to be disturbed: a convolutional net with BatchNorm and dropout, and a transformer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class TinyConv(nn.Module):
    """Two equal blocks of convolution, BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.1))
            for _ in range(2)
        )
        self.head = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class TinyTransformer(nn.Module):
    """Two encoder layers with dropout over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


Subject = tuple[nn.Module, torch.optim.Optimizer, Any]


def conv() -> Subject:
    """Model, its optimizer after one step, and 4 samples."""
    torch.manual_seed(0)
    return _trained(TinyConv(), torch.randn(4, 3, 6, 6))


def transformer() -> Subject:
    """Model, its optimizer after one step, and 4 samples."""
    torch.manual_seed(0)
    return _trained(TinyTransformer(), torch.randint(0, 16, (4, 5)))


SUBJECTS = {"conv": conv, "transformer": transformer}


def _trained(model: nn.Module, inputs: torch.Tensor) -> Subject:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = (inputs, torch.randint(0, 4, (4,)))
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    return model, optimizer, batch
