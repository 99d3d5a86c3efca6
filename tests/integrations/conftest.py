"""Tiny models and data that can be learned in a few steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from autofit.candidate import Candidate, Checkpointing
from autofit.device import device_info
from autofit.environment import describe_environment
from autofit.memory.tracked import TrackedMeter
from autofit.plan import Plan, Trial
from autofit.units import GiB

VOCABULARY = 40


class Texts(Dataset[dict[str, Tensor]]):
    """Token sequences of two classes: one uses the lower half of the vocabulary, the other the upper."""

    def __init__(self, samples: int = 64, length: int = 12) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(2, (samples,), generator=generator)
        tokens = torch.randint(VOCABULARY // 2, (samples, length), generator=generator)
        self.tokens = tokens + self.labels[:, None] * (VOCABULARY // 2)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}

    def batch(self, samples: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[:samples], "labels": self.labels[:samples]}


@pytest.fixture
def texts() -> Texts:
    return Texts()


@pytest.fixture
def bert() -> Any:
    """A BERT classifier of two layers."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=2,
    )
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(config)


def plan_of(model: torch.nn.Module, *, target: int = 16, steps: int = 4, **values: Any) -> Plan:
    """A plan for the model as `tune` would have made it, without the seconds that it takes."""
    candidate = Candidate(micro_batch_size=-(-target // steps), accumulation_steps=steps, **values)
    trial = Trial(number=0, candidate=candidate, outcome="feasible", samples_per_second=1.0, micro_step_seconds=0.01)
    environment = describe_environment(
        model, device_info(torch.device("cpu")), memory_source=TrackedMeter.source, optimizer="AdamW", seed=0
    )
    return Plan(
        target_batch=target, budget_bytes=GiB, cap_bytes=GiB, best_number=0, trials=(trial,), environment=environment
    )


FULL = Checkpointing(mode="full")


def watch_sizes(model: torch.nn.Module) -> list[int]:
    """The sizes of the batches that the model is called with from now on."""
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(len(_first(args, kwargs))), with_kwargs=True)
    return seen


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
