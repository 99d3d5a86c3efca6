"""A model, its optimizer and its batch without values: same shapes, strides, dtypes, ties and hooks, no bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.batch.nest import map_leaves
from autofit.optimizers import optimizer_factory, twin
from autofit.predict.failures import UntraceableError
from autofit.snapshot import restored

OptimizerLike = Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer] | None


class Shadow:
    """Fake tensors for real ones, each made once, so that what is tied stays tied. Use it under a `FakeTensorMode`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._fakes: dict[int, torch.Tensor] = {}

    def take_over(self, model: nn.Module) -> None:
        """Puts fake parameters and buffers into every submodule; the real objects are left as they are."""
        for name, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    _check_kind(parameter, f"{name}.{key}".lstrip("."))
                    module._parameters[key] = self._parameter(parameter)
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = self.tensor(buffer)

    def tensor(self, real: torch.Tensor) -> torch.Tensor:
        """A fake tensor on the traced device of the real one's shape, strides and dtype."""
        fake = self._fakes.get(id(real))
        if fake is None:
            fake = self._fakes[id(real)] = _like(real, self._device)
        return fake

    def optimizer(self, optimizer: OptimizerLike, model: nn.Module) -> Optimizer:
        """The optimizer over the fake parameters, with fakes of the state that it has already."""
        if not isinstance(optimizer, Optimizer):
            return optimizer_factory(optimizer, model)()
        shadow = twin(optimizer)
        for group in shadow.param_groups:
            group["params"] = [self._parameter(parameter) for parameter in group["params"]]
        state: defaultdict[Any, Any] = defaultdict(dict)
        for parameter, values in optimizer.state.items():
            state[self._parameter(parameter)] = map_leaves(self._state, values)
        shadow.state = state
        return shadow

    def _parameter(self, real: Any) -> Any:
        fake: Any = self._fakes.get(id(real))
        if fake is None:
            fake = nn.Parameter(_like(real, self._device), requires_grad=real.requires_grad)
            vars(fake).update(vars(real))
            for hook in (real._backward_hooks or {}).values():
                fake.register_hook(hook)
            for hook in (real._post_accumulate_grad_hooks or {}).values():
                fake.register_post_accumulate_grad_hook(hook)
            self._fakes[id(real)] = fake
        return fake

    def _state(self, value: Any) -> Any:
        """Steps are counted on the host; everything else lies with its parameter."""
        if not isinstance(value, torch.Tensor):
            return value
        return _like(value, torch.device("cpu") if value.dim() == 0 and value.device.type == "cpu" else self._device)


def _check_kind(parameter: torch.Tensor, name: str) -> None:
    if type(parameter) not in (nn.Parameter, torch.Tensor) or parameter.layout != torch.strided:
        raise UntraceableError(
            f"Parameter {name!r} is a {type(parameter).__name__}; only dense torch parameters can be traced.",
            module=name.rpartition(".")[0],
        )


def _like(real: torch.Tensor, device: torch.device) -> torch.Tensor:
    if real.is_contiguous():
        return torch.empty(real.shape, dtype=real.dtype, device=device)
    return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)


def fake_batch(batch: Any, device: torch.device) -> Any:
    """The batch without values, on the host, or on the traced device where it lies there already."""

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        made = _like(leaf, device if leaf.device.type == device.type else torch.device("cpu"))
        return made.requires_grad_(leaf.requires_grad)

    return map_leaves(fake, batch)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Whatever a trace does inside, the model, random states and torch's switches are afterwards what they were.

    Nothing is copied: no real tensor is written to, because none takes part.
    """
    with restored(model, None, device=torch.device("meta")):
        yield
