"""Torch's global switches: read all of them, put all of them back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

backends: Any = torch.backends  # the switches' attributes are made at import and not in torch's stubs


class Flags:
    """Torch's global switches at one moment."""

    def __init__(self) -> None:
        self._before = {name: read() for name, (read, _) in _SWITCHES.items()}

    def changed(self) -> list[str]:
        """Names of the switches that are not what they were."""
        return [name for name, (read, _) in _SWITCHES.items() if read() != self._before[name]]

    def put_back(self) -> list[str]:
        """Sets every switch that has changed to what it was; names those that it could not set."""
        for name in self.changed():
            _SWITCHES[name][1](self._before[name])
        return [f"torch switch {name}" for name in self.changed()]


@contextmanager
def float32_arithmetic(mode: str) -> Iterator[None]:
    """Float32 products of matrices and convolutions on CUDA in `"ieee"` float32 or in `"tf32"`; undone on exit.

    Torch has an old and a new set of switches for this and refuses to read the old ones when the two disagree, so both
    are set.
    """
    before = _read_float32()
    if before[1] == (mode, mode, mode):
        yield
        return
    try:
        _write_old_float32((mode == "tf32", mode == "tf32", None))
        _write_new_float32((mode, mode, mode))
        yield
    finally:
        _write_float32(before)


_OldFloat32 = tuple[bool, bool, str | None]


def _read_float32() -> tuple[_OldFloat32 | None, tuple[str, str, str], str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            old: _OldFloat32 | None = (
                backends.cuda.matmul.allow_tf32,
                backends.cudnn.allow_tf32,
                torch.get_float32_matmul_precision(),
            )
        except RuntimeError:  # the two sets disagree already
            old = None
    new = (backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision, backends.cudnn.rnn.fp32_precision)
    return old, new, backends.mkldnn.matmul.fp32_precision


def _write_float32(state: tuple[_OldFloat32 | None, tuple[str, str, str], str]) -> None:
    old, new, mkldnn = state
    if old is not None:
        _write_old_float32(old)
    _write_new_float32(new)
    if backends.mkldnn.matmul.fp32_precision != mkldnn:
        backends.mkldnn.matmul.fp32_precision = mkldnn


def _write_old_float32(old: _OldFloat32) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backends.cuda.matmul.allow_tf32 = old[0]
        backends.cudnn.allow_tf32 = old[1]
        if old[2] is not None:  # last: "medium" and "high" both mean TF32 here, and the switch above makes it "high"
            torch.set_float32_matmul_precision(old[2])


def _write_new_float32(new: tuple[str, str, str]) -> None:
    backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision, backends.cudnn.rnn.fp32_precision = new


def _write_deterministic(state: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])


def _read_autocast() -> tuple[Any, ...]:
    kinds = ("cpu", "cuda")
    return (
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
        torch.is_autocast_cache_enabled(),
    )


def _write_autocast(state: tuple[Any, ...]) -> None:
    for kind, (enabled, dtype) in zip(("cpu", "cuda"), state[:2], strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(state[2])


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "num_threads": (torch.get_num_threads, torch.set_num_threads),
    "anomaly_detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "deterministic_algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _write_deterministic,
    ),
    "autocast": (_read_autocast, _write_autocast),
    "float32_arithmetic": (_read_float32, _write_float32),
    "cudnn.enabled": _attribute(backends.cudnn, "enabled"),
    "cudnn.benchmark": _attribute(backends.cudnn, "benchmark"),
    "cudnn.deterministic": _attribute(backends.cudnn, "deterministic"),
    "flash_sdp": (backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp),
    "mem_efficient_sdp": (backends.cuda.mem_efficient_sdp_enabled, backends.cuda.enable_mem_efficient_sdp),
    "math_sdp": (backends.cuda.math_sdp_enabled, backends.cuda.enable_math_sdp),
    "cudnn_sdp": (backends.cuda.cudnn_sdp_enabled, backends.cuda.enable_cudnn_sdp),
}
