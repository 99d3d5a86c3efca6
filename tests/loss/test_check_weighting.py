"""Whether a loss is the weighted sum of its parts, tried out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autofit.batch import infer_layout
from autofit.loss import check_weighting, resolve_loss, resolve_weighting

batch = (torch.randn(11, 4, generator=torch.Generator().manual_seed(0)), torch.arange(11) % 3)


def check(
    model: nn.Module, *, batch: Any = batch, weight: Any = None, samples: int = 8, **options: Any
) -> float | None:
    layout, weighting = infer_layout(batch), resolve_weighting(batch, model=model, loss_weight=weight, **options)
    return check_weighting(resolve_loss(**options), model, layout, batch, weighting, samples=samples)


def noisy() -> nn.Module:
    """A model that is noisy in training and keeps statistics of its batches."""
    return nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))


def contrastive(model: nn.Module, batch: Any) -> torch.Tensor:
    """Each sample against all others of its batch."""
    features = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(features @ features.T * 10, torch.arange(len(features)))


@pytest.mark.parametrize("samples", [2, 3, 8, 100])
def test_a_separable_loss_agrees(samples: int) -> None:
    """Only rounding is left, however many samples are taken."""
    difference = check(noisy(), samples=samples)
    assert difference is not None
    assert difference < 1e-6


def test_a_loss_that_compares_samples_is_found_out() -> None:
    """A contrastive loss over parts is another loss; no weighting mends it."""
    difference = check(noisy(), compute_loss=contrastive)
    assert difference is not None
    assert difference > 0.05


def test_a_wrong_weighting_is_found_out() -> None:
    """A sum weighted as a mean is off by its factors."""
    difference = check(noisy(), loss_fn=lambda out, t: F.cross_entropy(out, t, reduction="sum"))
    assert difference is not None
    assert difference > 0.1


def test_nothing_is_left_changed() -> None:
    """Modes, statistics and gradients are what they were, also those of single submodules."""
    model = noisy().train()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check(model)
    assert [module.training for module in model.modules()] == [True, True, False, True]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_modes_come_back_when_the_model_fails() -> None:
    """The model's own error passes, and its modes are restored."""
    model = noisy().train()
    with pytest.raises(RuntimeError, match=r"mat1 and mat2|running_mean"):
        check(model, batch=(torch.rand(4, 9), torch.arange(4)))
    assert all(module.training for module in model.modules())


class LossInTraining(nn.Linear):
    """Gives losses in training and predictions in eval mode, as torchvision's detection models do."""

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        return {"loss": out.mean()} if self.training else [out]


INCONCLUSIVE = {
    "one sample": (noisy(), {"batch": (torch.rand(1, 4), torch.tensor([1]))}),
    "no loss in eval mode": (LossInTraining(4, 3), {"batch": torch.rand(6, 4)}),
    "not finite": (noisy(), {"loss_fn": lambda out, t: F.cross_entropy(out / 0, t)}),
}


@pytest.mark.parametrize(("model", "options"), INCONCLUSIVE.values(), ids=INCONCLUSIVE)
def test_none_where_nothing_can_be_said(model: nn.Module, options: dict[str, Any]) -> None:
    """Neither agreement nor disagreement is claimed."""
    assert check(model, **options) is None


def test_recurrent_models_are_judged_by_their_loss() -> None:
    """Their layers may refuse to go backward in eval mode."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(4, 3, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.layer(x)[0][:, -1]
            assert not out.requires_grad
            return out

    sequences = (torch.rand(6, 5, 4), torch.tensor([0, 1, 2, -100, -100, -100]))
    difference = check(Recurrent(), batch=sequences)
    assert difference is not None
    assert difference < 1e-6


def test_wrong_weights_show_in_the_gradient_where_losses_are_alike() -> None:
    """With all logits at zero every sample loses log(3), yet gradients differ."""
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    target = torch.tensor([0, 1, 2, 1, 0, -100, -100, 2])
    difference = check(model, batch=(batch[0][:8], target), compute_loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    assert difference is not None
    assert difference > 0.05


def test_sparse_gradients_are_compared_too() -> None:
    """Embeddings may give sparse gradients."""
    model = nn.Embedding(5, 3, sparse=True)
    difference = check(model, batch=(torch.arange(5), torch.tensor([0, 1, 2, -100, 1])))
    assert difference is not None
    assert difference < 1e-6


def test_a_loss_of_zero_agrees() -> None:
    """No division by zero."""
    assert check(noisy(), loss_fn=lambda out, t: out.sum() * 0) == 0.0


def test_the_batch_follows_the_model() -> None:
    """The batch is moved to the device of the model's parameters."""
    seen = []

    def loss(model: nn.Module, part: Any) -> torch.Tensor:
        seen.append(part[0].device.type)
        return torch.tensor(1.0)  # needs no device to be read

    check(noisy().to("meta"), compute_loss=loss)
    assert set(seen) == {"meta"}
