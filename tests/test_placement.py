"""A model moved to another device and back; the CPU under its other name stands in for a second device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autofit.errors import ConfigError
from autofit.placement import placed
from tests.states import FullState

ELSEWHERE = torch.device("cpu", 0)


def tied_model() -> nn.Module:
    """A tied weight, a shared buffer, a view of a larger storage, and a gradient."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    flat = torch.arange(6.0)
    model[0].bias = nn.Parameter(flat[:3])
    model[1].bias = nn.Parameter(flat[3:])
    model.register_buffer("again", model[2].running_mean)
    model(torch.randn(4, 3)).sum().backward()
    return model


def test_moved_and_back() -> None:
    """Everything lies on the device inside; afterwards it is the very same as before, gradients too."""
    model = tied_model()
    before = FullState(model)
    weight, pointer = model[0].weight, model[0].weight.data_ptr()
    with placed(model, device=ELSEWHERE):
        assert model[0].weight.data_ptr() != pointer
        assert model[0].weight is weight is model[1].weight
        assert model[0].weight.grad is None
        assert model.again is model[2].running_mean
        assert model[0].bias.untyped_storage()._cdata == model[1].bias.untyped_storage()._cdata
        assert model[1].bias.storage_offset() == 3
    assert before.differences(model) == []


def test_back_after_an_error() -> None:
    """An exception inside changes nothing of that."""
    model = tied_model()
    before = FullState(model)
    with pytest.raises(KeyboardInterrupt), placed(model, device=ELSEWHERE):
        raise KeyboardInterrupt
    assert before.differences(model) == []


def test_already_there_is_left_alone() -> None:
    """On the same device nothing is moved and gradients stay."""
    model = tied_model()
    gradient = model[0].weight.grad
    with placed(model, device=torch.device("cpu")):
        assert model[0].weight.grad is gradient


def test_a_model_without_values_is_refused() -> None:
    """Parameters on `meta` cannot be trained."""
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="to_empty"), placed(model, device=torch.device("cpu")):
        pass
