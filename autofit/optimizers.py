"""The optimizer of a trial: a new one each time, or a twin of the user's that leaves the user's own untouched."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.errors import ConfigError

OptimizerFactory = Callable[[], Optimizer]


def optimizer_factory(
    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer] | None, model: nn.Module
) -> OptimizerFactory:
    """Makes the optimizer of a trial from what the user passed: an optimizer, a callable of the parameters, or None.

    Raises ConfigError for one that cannot step without a closure, or that holds none of the model's parameters.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer is None:
        return lambda: torch.optim.AdamW(trainable)
    if isinstance(optimizer, Optimizer):
        check_optimizer(optimizer, model)
        user_optimizer = optimizer
        return lambda: twin(user_optimizer)
    if not callable(optimizer):
        raise ConfigError(
            f"optimizer must be a torch Optimizer, a callable that makes one from parameters, or None; "
            f"got {type(optimizer).__name__}."
        )
    make = optimizer
    try:
        made = make(trainable)
    except Exception as error:
        raise ConfigError(
            f"The optimizer callable failed on the model's {len(trainable)} trainable parameters: "
            f"{type(error).__name__}: {error}. It is called with one argument, a list of parameters."
        ) from error
    if not isinstance(made, Optimizer):
        raise ConfigError(f"The optimizer callable must return a torch Optimizer, got {type(made).__name__}.")
    check_optimizer(made, model)
    return lambda: make(trainable)


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Raises ConfigError for one that cannot step without a closure, or that holds none of the model's parameters."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} needs a closure that evaluates the model several times per step, which "
            "cannot be accumulated over micro-batches. Use an optimizer whose step() needs none, such as AdamW or SGD."
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in held for parameter in model.parameters()):
        raise ConfigError(
            f"The {type(optimizer).__name__} holds none of the model's parameters. Make it from model.parameters() of "
            "this very model, after the model was moved or wrapped."
        )


def twin(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same kind, arguments and state over the same parameters.

    State tensors that lie with their parameter are shared, not copied, so the twin takes no further memory; who steps
    it must put their values back afterwards. Others (the model was moved) are copied to the parameter. Hooks stay
    behind.
    """
    other = object.__new__(type(optimizer))
    vars(other).update(vars(optimizer))
    for name in ("step", "zero_grad"):  # a scheduler's wrapper would step the original
        vars(other).pop(name, None)
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks") and isinstance(value, OrderedDict):
            vars(other)[name] = OrderedDict()
    other.param_groups = [dict(group, params=list(group["params"])) for group in optimizer.param_groups]
    other.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        other.state[parameter] = _beside(parameter, state)
    return other


def _beside(parameter: Any, state: Any) -> Any:
    """One parameter's state, with every tensor of the parameter's shape on the parameter's device."""
    if not isinstance(state, dict):
        return state
    return {
        key: value.to(parameter.device) if isinstance(value, torch.Tensor) and value.shape == parameter.shape else value
        for key, value in state.items()
    }
