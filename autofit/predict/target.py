"""Fake tensors dispatch as tensors on the target device would, with or without its driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import _foreach_supported_types as _optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as _clipping_types

from autofit.gpus import Capability
from autofit.predict.attention import cuda_attention


class FakeMode(FakeTensorMode):
    """Tensors without values; what is written in the code and moved to the device needs no driver either."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call]
        self._driver = torch.cuda.is_available()

    @property
    def avoid_device_init(self) -> bool:
        """Asked of torch later on, the answer would be that of `dispatching_as`."""
        return not self._driver


@contextmanager
def dispatching_as(device: torch.device, capability: Capability) -> Iterator[None]:
    """Inside, torch chooses kernels for `device` as if it were there; every change is undone on exit.

    For CUDA: the attention kernel of that compute capability, optimizers and gradient clipping over lists of tensors,
    and autocast and gradient scaling, which otherwise turn themselves off without a driver.
    """
    with ExitStack() as stack:
        if device.type == "cuda":
            replacement = cuda_attention(capability)
            stack.enter_context(patch.object(torch.nn.functional, "scaled_dot_product_attention", replacement))
            stack.enter_context(_lists_of_fakes())
            if not torch.cuda.is_available():
                stack.enter_context(_driver_answers(capability))
        yield


@contextmanager
def _lists_of_fakes() -> Iterator[None]:
    """Multi-tensor kernels are the default for real CUDA tensors; the check is by exact type."""
    kinds: tuple[list[Any], ...] = _optimizer_types, _clipping_types
    for kind in kinds:
        kind.append(FakeTensor)
    try:
        yield
    finally:
        for kind in kinds:
            kind.remove(FakeTensor)


@contextmanager
def _driver_answers(capability: Capability) -> Iterator[None]:
    answers = {
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: capability >= (8, 0),
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda *_, **__: capability,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "synchronize": lambda *_, **__: None,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        yield
