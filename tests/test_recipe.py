"""A plan as plain PyTorch code: run here, and held against the step that it describes."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autofit
from autofit.candidate import Candidate, Checkpointing, SearchSpace
from autofit.errors import ConfigError
from autofit.flags import Flags
from autofit.loss_facts import LossFacts
from autofit.plan import Plan
from autofit.recipe import to_python
from autofit.step import TrainStep
from tests.models import ConvNet, image_batch


class Output:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class OnDicts(ConvNet):
    """Takes a dict and gives its loss, as models of transformers do."""

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> Output:  # type: ignore[override]
        return Output(F.cross_entropy(super().forward(images), labels))


def stack() -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for width in (3 * 8 * 8, 32, 32, 32, 32):
        layers += [nn.Linear(width, 32), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(32, 10))


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (ConvNet, {}),
    "tf32": (ConvNet, {"precision": "tf32"}),
    "bfloat16": (ConvNet, {"precision": "bfloat16"}),
    "float16": (ConvNet, {"precision": "float16"}),
    "blocks": (ConvNet, {"checkpointing": Checkpointing(mode="full", blocks=("blocks.0", "blocks.2"))}),
    "runs of layers": (stack, {"checkpointing": Checkpointing(mode="full", blocks=("[0:5]", "[5:11]"))}),
    "selective": (ConvNet, {"checkpointing": Checkpointing(mode="selective", blocks=("blocks.0", "blocks.2"))}),
    "a mask": (
        ConvNet,
        {
            "checkpointing": Checkpointing.of(
                {"blocks.0": "full", "blocks.1": "selective", "blocks.2": "offload"},
            )
        },
    ),
    "runs, mixed": (stack, {"checkpointing": Checkpointing.of({"[5:11]": "full", "[0:5]": "selective"})}),
    "a dict": (OnDicts, {"checkpointing": Checkpointing(mode="full", blocks=("blocks.1",))}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_code_trains_as_the_plan_does(name: str) -> None:
    """Same weights and buffers after two steps, an uneven last batch among them, dropout and BatchNorm included."""
    make, values = CASES[name]
    candidate = Candidate(micro_batch_size=3, accumulation_steps=3, **values)
    code = to_python(candidate, target_batch=8)
    assert "autofit" not in code
    flags = Flags()
    results = []
    for kind in ("code", "step"):
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        images, labels = image_batch(8, size=8)
        batches = [
            {"images": i, "labels": t} if name == "a dict" else (i, t)
            for i, t in ((images, labels), (images[:5], labels[:5]))
        ]
        torch.manual_seed(1)
        if kind == "code":
            written: dict[str, Any] = {}
            exec(compile(code, "recipe", "exec"), written)
            if candidate.checkpointing.modes:
                written["recompute_blocks"](model)
            losses = [float(written["train_step"](model, optimizer, batch)) for batch in batches]
            flags.put_back()
        else:
            step = TrainStep(model, optimizer, candidate, loss_fn=None if name == "a dict" else F.cross_entropy)
            losses = [float(step(batch).loss) for batch in batches]
        results.append((losses, torch.cat([value.double().flatten() for value in model.state_dict().values()])))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert torch.equal(results[0][1], results[1][1])


class Tokens(nn.Module):
    """One score per class for every position, with the position last, as cross_entropy wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.embedding(ids))).movedim(-1, 1)


class LMHead(Tokens):
    """A causal language model by transformers' conventions: it shifts the labels itself."""

    config = object()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:  # type: ignore[override]
        scores = super().forward(input_ids)
        return Output(F.cross_entropy(scores[..., :-1], labels[..., 1:]))


def ragged_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Samples that count very different numbers of positions, some none."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 11, (8, 6), generator=generator)
    targets = ids.clone()
    for sample, ignored in enumerate((6, 6, 6, 5, 0, 0, 2, 1)):
        targets[sample, :ignored] = -100
    return ids, targets


def weighted_loss() -> nn.Module:
    return nn.CrossEntropyLoss(weight=torch.linspace(0.1, 3, 11))


def half(batch: Any) -> torch.Tensor:
    return (batch[1] != -100).sum() / 2


def mean_of_counted(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Seconds(nn.Module):
    """Samples lie along dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.layer(x).squeeze(-1) * scale


def along_dim_1() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 8, 8, generator=generator), torch.ones(1), torch.randn(3, 8, generator=generator)


LOSSES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "ignored targets": (Tokens, ragged_tokens, {}),
    "ignored targets, loss passed": (Tokens, ragged_tokens, {"loss_fn": F.cross_entropy}),
    "class weights": (Tokens, ragged_tokens, {"loss_fn": weighted_loss()}),
    "summed": (Tokens, ragged_tokens, {"loss_fn": nn.CrossEntropyLoss(reduction="sum")}),
    "shifted labels": (LMHead, lambda: dict(zip(("input_ids", "labels"), ragged_tokens(), strict=True)), {}),
    "own weight and loss": (Tokens, ragged_tokens, {"compute_loss": mean_of_counted, "loss_weight": half}),
    "by samples, as asked": (Tokens, lambda: (ragged_tokens()[0],) * 2, {"loss_weight": "samples"}),
    "samples along dim 1": (Seconds, along_dim_1, {"batch_dims": {"0": 1, "1": None, "2": 1}}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_code_weighs_and_cuts_as_the_plan_does(name: str) -> None:
    """Gradients of the written code, of the plan's step, and of the full batch at once are one and the same."""
    make, make_batch, options = LOSSES[name]
    torch.manual_seed(0)
    model, batch = make(), make_batch()
    space = SearchSpace(accumulation_steps=3, precision="float32", checkpointing="none")
    plan = autofit.tune(
        model, batch, target_batch=8, space=space, device="cpu", optimizer=partial(torch.optim.SGD, lr=0.1), **options
    )
    assert Plan.from_json(plan.to_json()).loss == plan.loss
    written: dict[str, Any] = {}
    flags = Flags()
    exec(compile(plan.to_python(), "recipe", "exec"), written)
    flags.put_back()
    callables = {key: value for key, value in options.items() if callable(value)}
    results = []
    for kind in ("code", "step", "whole"):
        trained = copy.deepcopy(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        if kind == "code":
            loss = written["train_step"](trained, optimizer, batch, **callables)
        elif kind == "step":
            loss = plan.train_step(trained, optimizer, **callables)(batch).loss
        else:
            whole = Candidate(micro_batch_size=8, accumulation_steps=1)
            loss = TrainStep(trained, optimizer, whole, **options)(batch).loss
        results.append(torch.cat([loss.reshape(1), *(p.detach().flatten() for p in trained.parameters())]))
    assert not torch.equal(results[0][1:], torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])


def test_functions_have_to_be_passed_again() -> None:
    """A file cannot hold them, and another loss would be trained without a word."""
    plan = autofit.tune(
        Tokens(),
        ragged_tokens(),
        target_batch=8,
        space=SearchSpace(accumulation_steps=2, precision="float32", checkpointing="none"),
        device="cpu",
        compute_loss=mean_of_counted,
        loss_weight=half,
    )
    model = Tokens()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError, match=r"tuned with compute_loss=, loss_weight= "):
        plan.train_step(model, optimizer)
    with pytest.raises(ConfigError, match=r"tuned with loss_weight= "):
        plan.train_step(model, optimizer, compute_loss=mean_of_counted)


def test_a_list_of_samples_is_refused() -> None:
    """With what to do instead."""
    with pytest.raises(ConfigError, match=r"plan\.train_step"):
        to_python(
            Candidate(micro_batch_size=1, accumulation_steps=2), target_batch=2, facts=LossFacts(splits={"": "list"})
        )
