"""A model moved to the device that it is tuned on, and back, with every parameter object and every tie kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from autofit.errors import ConfigError
from autofit.interrupts import uninterrupted
from autofit.snapshot import as_bytes


@contextmanager
def placed(model: nn.Module, *, device: torch.device) -> Iterator[None]:
    """Parameters and buffers on `device` inside, where they were afterwards; the originals are never written to.

    Gradients that the moved parameters carry are put aside meanwhile. Raises ConfigError for parameters on `meta`.
    """
    _refuse_meta(model)
    mover = _Mover(device)
    try:
        for module in model.modules():
            mover.move_parameters(module)
            mover.move_buffers(module)
        yield
    finally:
        with uninterrupted():
            mover.put_back()


def _refuse_meta(model: nn.Module) -> None:
    empty = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if empty:
        raise ConfigError(
            f"{len(empty)} parameters, {empty[0]!r} first, lie on the 'meta' device and have no values. "
            "Materialise the model first, with model.to_empty(device='cpu') and its initialisation or checkpoint."
        )


class _Mover:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: dict[int, torch.UntypedStorage] = {}
        self._parameters: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor | None]] = []
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._done: dict[int, torch.Tensor] = {}

    def move_parameters(self, module: nn.Module) -> None:
        for parameter in module._parameters.values():
            if parameter is None or parameter.device == self._device or id(parameter) in self._done:
                continue
            elsewhere = self._to_device(parameter.detach())
            self._parameters.append((parameter, parameter.detach(), parameter.grad))
            parameter.grad = None
            parameter.data = elsewhere
            self._done[id(parameter)] = elsewhere

    def move_buffers(self, module: nn.Module) -> None:
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.device == self._device:
                continue
            if id(buffer) not in self._done:
                self._done[id(buffer)] = self._to_device(buffer.detach())
            self._buffers.append((module, name, buffer))
            module._buffers[name] = self._done[id(buffer)]

    def put_back(self) -> None:
        for parameter, original, gradient in self._parameters:
            parameter.grad = None
            parameter.data = original
            parameter.grad = gradient
        for module, name, buffer in self._buffers:
            module._buffers[name] = buffer

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device. Tensors that look at one storage look at one there too."""
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            return tensor.to(self._device)
        storage = tensor.untyped_storage()
        moved = self._moved.get(storage._cdata)
        if moved is None:
            moved = as_bytes(storage).to(self._device, copy=True).untyped_storage()
            self._moved[storage._cdata] = moved
        empty = torch.empty(0, dtype=tensor.dtype, device=self._device)
        return empty.set_(moved, tensor.storage_offset(), tensor.shape, tensor.stride())
