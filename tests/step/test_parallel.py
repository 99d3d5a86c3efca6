"""One step over several ranks: the gradients are those of one process on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autofit.candidate import Candidate, Checkpointing, Parallelism
from autofit.errors import ConfigError
from autofit.loss_facts import LossFacts
from autofit.recipe import to_python
from autofit.step import TrainStep
from tests.ranks import results, run_ranks

pytestmark = pytest.mark.distributed

SAMPLES, WIDTH, LENGTH, WORDS = 13, 16, 6, 11


class Decoder(nn.Module):
    """A small transformer whose loss is a mean over the targets that count, which differ from sample to sample."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.spare = nn.Linear(WIDTH, 2) if unused else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)


def count(batch: Any) -> torch.Tensor:
    return (batch[1] != -100).sum()


def make(unused: bool) -> tuple[Decoder, torch.Tensor, torch.Tensor]:
    """Model, tokens and targets, the same everywhere; in double precision, so that only the method is compared."""
    torch.manual_seed(0)
    model = Decoder(unused=unused).double()
    tokens = torch.randint(0, WORDS, (SAMPLES, LENGTH))
    targets = tokens.roll(-1, 1).masked_fill(torch.rand(SAMPLES, LENGTH) < 0.4, -100)
    targets[:, 0] = 1
    return model, tokens, targets


class Keeping(torch.optim.SGD):
    """Keeps a copy of the gradients of every step, and takes it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.05)
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self.seen: list[dict[str, torch.Tensor]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = {self._names[p]: p.grad for p in self.param_groups[0]["params"]}
        self.seen.append({name: gradient.clone() for name, gradient in held.items() if gradient is not None})
        super().step(closure)


def trained(rank: int, shares: tuple[int, ...], candidate: Candidate, unused: bool) -> tuple[list[Any], list[float]]:
    """Gradients of three steps on this rank's share of the batch, and the losses."""
    model, tokens, targets = make(unused)
    begin = sum(shares[:rank])
    own = slice(begin, begin + shares[rank])
    optimizer = Keeping(model)
    step = TrainStep(model, optimizer, candidate, loss_fn=loss_fn, loss_weight=count)
    losses = [float(step((tokens[own], targets[own])).loss) for _ in range(3)]
    assert all(parameter.grad is None for parameter in model.parameters())
    return optimizer.seen, losses


def of_one_process(unused: bool) -> tuple[list[Any], list[float]]:
    model, tokens, targets = make(unused)
    optimizer = Keeping(model)
    losses = []
    for _ in range(3):
        loss = loss_fn(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return optimizer.seen, losses


BLOCKS = Checkpointing(mode="full", blocks=("layers.0", "layers.1"))
DDP = Parallelism(mode="ddp")


@pytest.mark.parametrize(
    ("shares", "micro_batch_size", "steps", "checkpointing", "parallelism"),
    [
        pytest.param((7, 6), 7, 1, Checkpointing(), DDP, id="2 ranks"),
        pytest.param((7, 6), 3, 3, BLOCKS, DDP, id="2 ranks, accumulated, checkpointed"),
        pytest.param((10, 3), 2, 5, BLOCKS, DDP, id="2 ranks with very uneven shares"),
        pytest.param((4, 3, 3, 3), 2, 2, BLOCKS, DDP, id="4 ranks, accumulated, checkpointed"),
        pytest.param((7, 6), 7, 1, BLOCKS, Parallelism(mode="ddp", static_graph=True), id="2 ranks, static graph"),
        pytest.param((7, 6), 4, 2, BLOCKS, Parallelism(mode="ddp", static_graph=True), id="2 ranks, not static"),
    ],
)
def test_gradients_are_those_of_the_whole_batch(
    shares: tuple[int, ...], micro_batch_size: int, steps: int, checkpointing: Checkpointing, parallelism: Parallelism
) -> None:
    """Of every parameter, in three steps one after the other, to a millionth; and so is the mean of the losses."""
    candidate = Candidate(
        micro_batch_size=micro_batch_size,
        accumulation_steps=steps,
        checkpointing=checkpointing,
        parallelism=parallelism,
    )
    expected, losses = of_one_process(False)
    seen = results(run_ranks(trained, len(shares), shares, candidate, False))
    for gradients, _ in seen:
        assert_same(gradients, expected)
    assert [sum(values) / len(shares) for values in zip(*(own for _, own in seen), strict=True)] == pytest.approx(
        losses
    )


def test_parameters_without_gradient() -> None:
    """A part of the model that is not used gets no gradient, and keeps nobody from the rest."""
    parallelism = Parallelism(mode="ddp", find_unused_parameters=True)
    candidate = Candidate(micro_batch_size=4, accumulation_steps=2, parallelism=parallelism)
    expected, _ = of_one_process(True)
    for gradients, _ in results(run_ranks(trained, 2, (7, 6), candidate, True)):
        assert_same(gradients, expected)
        assert "spare.weight" not in gradients[0]


def assert_same(gradients: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> None:
    for own, whole in zip(gradients, expected, strict=True):
        assert own.keys() == whole.keys()
        for name, gradient in own.items():
            torch.testing.assert_close(
                gradient, whole[name], rtol=1e-6, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}"
            )


def trained_by_code(rank: int, shares: tuple[int, ...], candidate: Candidate) -> list[Any]:
    """Gradients as the written code makes them, which has no autofit in it."""
    model, tokens, targets = make(False)
    begin = sum(shares[:rank])
    own = slice(begin, begin + shares[rank])
    facts = LossFacts(given=("loss_fn", "loss_weight"), splits={"0": 0, "1": 0}, weighting="own")
    code = to_python(candidate, target_batch=SAMPLES, facts=facts)
    written: dict[str, Any] = {}
    exec(compile(code, "recipe", "exec"), written)
    written["recompute_blocks"](model)
    optimizer = Keeping(model)
    wrapped = written["together"](model)
    for _ in range(3):
        written["train_step"](wrapped, optimizer, (tokens[own], targets[own]), loss_fn, count)
    return optimizer.seen


def test_the_plain_code_of_a_plan_does_the_same() -> None:
    """What to_python() prints for several ranks: without autofit, the same gradients."""
    candidate = Candidate(micro_batch_size=3, accumulation_steps=3, checkpointing=BLOCKS, parallelism=DDP)
    expected, _ = of_one_process(False)
    for gradients in results(run_ranks(trained_by_code, 2, (7, 6), candidate)):
        assert_same(gradients, expected)


def ignored_on_one_rank(rank: int) -> str:
    """What the ranks say of a batch of which nothing counts on one of them."""
    model, tokens, targets = make(False)
    if rank == 1:
        targets = torch.full_like(targets, -100)
    candidate = Candidate(micro_batch_size=7, accumulation_steps=1, parallelism=DDP)
    step = TrainStep(model, Keeping(model), candidate, loss_fn=loss_fn, loss_weight=count)
    with pytest.raises(ConfigError) as caught:
        step((tokens[:7], targets[:7]))
    return str(caught.value)


def test_a_rank_whose_targets_are_all_ignored() -> None:
    """All ranks are told, and none waits for it."""
    first, second = results(run_ranks(ignored_on_one_rank, 2))
    assert first == second
    assert "On 1 of 2 ranks" in first


def test_without_a_process_group() -> None:
    """The step says what it needs."""
    model = nn.Linear(2, 2)
    candidate = Candidate(micro_batch_size=2, accumulation_steps=1, parallelism=DDP)
    with pytest.raises(ConfigError, match="torchrun"):
        TrainStep(model, torch.optim.SGD(model.parameters()), candidate)
