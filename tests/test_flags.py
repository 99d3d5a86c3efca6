"""Torch's global switches are read and put back, whichever of torch's two ways the user set them in."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autofit.flags import Flags, float32_arithmetic

backends: Any = torch.backends


def old_way(value: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backends.cuda.matmul.allow_tf32 = value


def new_way(value: str) -> None:
    backends.cuda.matmul.fp32_precision = value
    backends.cudnn.conv.fp32_precision = value


SETTINGS: dict[str, Callable[[], None]] = {
    "default": lambda: None,
    "old": lambda: old_way(True),
    "new": lambda: new_way("tf32"),
    "new ieee": lambda: new_way("ieee"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
}


@pytest.mark.parametrize("mode", ["ieee", "tf32"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_float32_arithmetic(setting: str, mode: str) -> None:
    """In force inside for products and convolutions alike, and undone on exit."""
    entry = Flags()
    try:
        SETTINGS[setting]()
        before = Flags()
        with float32_arithmetic(mode):
            assert backends.cuda.matmul.fp32_precision == mode
            assert backends.cudnn.conv.fp32_precision == mode
            assert backends.cudnn.rnn.fp32_precision == mode
        assert before.changed() == []
    finally:
        entry.put_back()


def test_every_switch_is_put_back() -> None:
    """What was changed is named, and nothing is left of it."""
    flags = Flags()
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.backends.cudnn.benchmark = True
    torch.set_autocast_enabled("cpu", True)
    torch.backends.cuda.enable_flash_sdp(False)
    assert set(flags.changed()) == {"grad_enabled", "default_dtype", "cudnn.benchmark", "autocast", "flash_sdp"}
    assert flags.put_back() == []
    assert flags.changed() == []
