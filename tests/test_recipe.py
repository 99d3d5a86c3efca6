"""A plan as plain PyTorch code: run here, and held against the step that it describes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autofit.candidate import Candidate, Checkpointing
from autofit.flags import Flags
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
            if candidate.checkpointing.mode == "full":
                written["recompute_blocks"](model)
            losses = [float(written["train_step"](model, optimizer, batch)) for batch in batches]
            flags.put_back()
        else:
            step = TrainStep(model, optimizer, candidate, loss_fn=None if name == "a dict" else F.cross_entropy)
            losses = [float(step(batch).loss) for batch in batches]
        results.append((losses, torch.cat([value.double().flatten() for value in model.state_dict().values()])))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert torch.equal(results[0][1], results[1][1])
