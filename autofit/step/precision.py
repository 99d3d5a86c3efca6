"""The arithmetic of a step: float32, TF32, or autocast to bfloat16 or float16 with scaled gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.amp.grad_scaler import GradScaler

from autofit.candidate import Precision
from autofit.flags import float32_arithmetic

_AUTOCAST_DTYPES: dict[Precision, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class StepPrecision:
    """How one precision runs on one device: switches for the step, autocast for a forward, a scaler for float16."""

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._precision = precision
        self._device = device
        self._dtype = _AUTOCAST_DTYPES.get(precision)
        self.scaler = GradScaler(device.type) if precision == "float16" else None

    def renew_scaler(self) -> None:
        """A scaler with the same scale, for a step that failed after its gradients were unscaled."""
        if self.scaler is not None:
            state = self.scaler.state_dict()
            self.scaler = GradScaler(self._device.type)
            self.scaler.load_state_dict(state)

    def activated(self) -> AbstractContextManager[None]:
        """Switches of the whole step; undone on exit. Mixed precisions leave float32 products as the user set them."""
        if self._device.type == "cuda" and self._precision in ("float32", "tf32"):
            return float32_arithmetic("tf32" if self._precision == "tf32" else "ieee")
        return nullcontext()

    def autocast_state(self) -> AutocastState:
        """What autocast is now, for the time after an interrupt."""
        return AutocastState(self._device.type)

    def forward(self) -> AbstractContextManager[None]:
        """Around the forward and the loss of one micro-batch."""
        return nullcontext() if self._dtype is None else autocast(self._device.type, self._dtype)


@contextmanager
def autocast(device_type: str, dtype: torch.dtype) -> Iterator[None]:
    """What `torch.autocast` does, by the same switches.

    `torch.autocast("cuda")` turns itself off where there is no driver; a step that is traced for a GPU that is not
    there must cast like the step that runs on it.
    """
    before = AutocastState(device_type)
    try:
        torch.autocast_increment_nesting()
        torch.set_autocast_enabled(device_type, True)
        torch.set_autocast_dtype(device_type, dtype)
        yield
    finally:
        before.put_back()


class AutocastState:
    """Autocast of one kind of device at one moment. Casts of weights are kept as long as it is nested in itself."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._enabled = torch.is_autocast_enabled(device_type)
        self._dtype = torch.get_autocast_dtype(device_type)
        self._nesting = _nesting()

    def put_back(self) -> None:
        """Sets all to what it was; may be called again, where an interrupt came between."""
        for _ in range(_nesting() - self._nesting):
            torch.autocast_decrement_nesting()
        if self._nesting == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(self._device_type, self._enabled)
        torch.set_autocast_dtype(self._device_type, self._dtype)


def _nesting() -> int:
    """How deep autocast is nested; torch tells it only where it changes."""
    return torch.autocast_increment_nesting() - 1 + 0 * torch.autocast_decrement_nesting()
