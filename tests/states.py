"""The whole state of a training, bit by bit, to be compared before and after."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from autofit.flags import Flags


def _bits(tensor: torch.Tensor) -> bytes:
    """A tensor's values as bytes: NaN equals itself, and 0.0 differs from -0.0."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return bytes(dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()) if dense.numel() else b""


def _plain(value: Any) -> Any:
    """Something that compares by value, for attributes of modules."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), _bits(value))
    if isinstance(value, torch.Generator):
        return _bits(value.get_state())
    if isinstance(value, nn.Module):
        return id(value)
    if isinstance(value, dict):
        return [(key if isinstance(key, (str, int)) else id(key), _plain(inner)) for key, inner in value.items()]
    if isinstance(value, (list, tuple, set)) or type(value).__name__ == "deque":
        return [_plain(inner) for inner in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else id(value)


class FullState:
    """Everything that tuning must leave as it was, captured as plain values."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        self._flags = Flags()
        self._values = self._read(model, optimizer)

    def differences(self, model: nn.Module, optimizer: Optimizer | None = None) -> list[str]:
        """Names of what is not what it was."""
        now = self._read(model, optimizer)
        names = [name for name in {**self._values, **now} if self._values.get(name) != now.get(name)]
        return sorted(names) + self._flags.changed()

    @staticmethod
    def _read(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
        values: dict[str, Any] = {"random": random.getstate(), "torch random": _bits(torch.get_rng_state())}
        name, keys, *rest = np.random.get_state()
        values["numpy random"] = (name, keys.tobytes(), *rest)
        for path, parameter in model.named_parameters(remove_duplicate=False):
            values[f"weights {path}"] = _plain(parameter.data)
            values[f"identity {path}"] = (id(parameter), parameter.data_ptr())
            values[f"requires_grad {path}"] = parameter.requires_grad
            values[f"gradients {path}"] = (
                None if parameter.grad is None else (id(parameter.grad), _bits(parameter.grad))
            )
        for path, module in model.named_modules():
            for key, value in vars(module).items():
                values[f"attribute {path}.{key}"] = _plain(value)
        for key, value in (vars(optimizer) if optimizer is not None else {}).items():
            values[f"optimizer {key}"] = _plain(value)
        return values
