"""What belongs to the process and not to a model: switches, handlers, filters, modes, patched attributes, tensors."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import optuna
import torch

from autofit.flags import Flags

_PATCHABLE = (
    torch, torch.Tensor, torch.cuda, torch.nn.functional, torch.nn.Module, torch.optim.Optimizer, torch.optim.AdamW,
    torch.utils.checkpoint, torch.autograd, torch.amp, torch.ops, optuna, optuna.storages, logging, warnings, sys, os,
)  # fmt: skip
_LOGGERS = ("", "autofit", "optuna", "sqlalchemy", "torch")


class Surroundings:
    """All of it at one moment."""

    def __init__(self) -> None:
        self._flags = Flags()
        self._before = _read()
        self._attributes = [(owner, dict(vars(owner))) for owner in _PATCHABLE]

    def differences(self) -> list[str]:
        """Names of what is not what it was."""
        now = _read()
        found = [f"{name}: {self._before[name]} -> {now[name]}" for name in now if now[name] != self._before[name]]
        for owner, before in self._attributes:
            name = getattr(owner, "__name__", repr(owner))
            ignored = ("last_value", "last_type", "last_traceback", "last_exc", "__warningregistry__")
            found += [
                f"{name}.{key} is another"
                for key, value in before.items()
                if key not in ignored and vars(owner).get(key) is not value
            ]
        return found + self._flags.changed()


def live_tensors() -> int:
    """Tensors that the garbage collector knows."""
    gc.collect()
    return sum(1 for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))


def _read() -> dict[str, Any]:
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    return {
        "live tensors": live_tensors(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        "inference mode": torch.is_inference_mode_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "warnings": list(warnings.filters),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "loggers": [(l.level, l.disabled, l.propagate, list(l.handlers), list(l.filters)) for l in loggers],  # noqa: E741
        "handlers": [(h.level, list(h.filters)) for l in loggers for h in l.handlers],  # noqa: E741
        "standard streams": (id(sys.stdout), id(sys.stderr)),
        "environment": dict(os.environ),
        "path": list(sys.path),
        "threads": threading.active_count(),
        "garbage collector": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),
        "excepthook": sys.excepthook,
        "folder": Path.cwd(),
    }
