"""Attention as a CUDA device would run it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autofit.predict.attention import choose_kernel
from autofit.predict.target import FakeMode, dispatching_as

CUDA = torch.device("cuda:0")
HALF, FULL, BRAIN = torch.float16, torch.float32, torch.bfloat16


def tensors(dtype: torch.dtype, *, head: int = 64, heads: int = 4, key_heads: int = 4) -> list[torch.Tensor]:
    return [
        torch.empty(2, count, 16, head, dtype=dtype, device=CUDA, requires_grad=True)
        for count in (heads, key_heads, key_heads)
    ]


@pytest.mark.parametrize(
    ("dtype", "capability", "shape", "masked", "causal", "kernel"),
    [
        (BRAIN, (8, 0), {}, False, True, "flash"),
        (HALF, (9, 0), {}, False, False, "flash"),
        (HALF, (8, 9), {}, True, False, "efficient"),  # flash takes no mask
        (HALF, (7, 5), {}, False, True, "efficient"),  # flash needs 8.0
        (BRAIN, (7, 5), {}, False, True, "math"),
        (FULL, (8, 6), {}, False, True, "efficient"),
        (FULL, (8, 6), {"head": 30}, False, False, "math"),  # not aligned to what a matrix instruction reads
        (FULL, (6, 1), {"head": 30}, False, False, "efficient"),
        (HALF, (8, 0), {"head": 320}, False, False, "efficient"),  # flash ends at heads of 256
        (FULL, (8, 0), {"key_heads": 2}, False, False, "math"),  # grouped keys only with flash
        (HALF, (8, 0), {"key_heads": 2}, False, False, "flash"),
        (torch.float64, (8, 0), {}, False, False, "math"),
        (FULL, (8, 0), {}, True, True, "math"),  # a mask and causality at once
    ],
)
def test_the_kernel_follows_torchs_rules(
    dtype: torch.dtype, capability: tuple[int, int], shape: dict[str, int], masked: bool, causal: bool, kernel: str
) -> None:
    """By compute capability, dtype, head size, mask and grouping."""
    with FakeMode():
        mask = torch.empty(16, 16, dtype=dtype, device=CUDA) if masked else None
        grouped = "key_heads" in shape
        found = choose_kernel(
            *tensors(dtype, **shape), mask, is_causal=causal, enable_gqa=grouped, capability=capability
        )
    assert found == kernel


def test_a_kernel_that_is_switched_off_is_not_taken() -> None:
    """The switches of `torch.nn.attention.sdpa_kernel` count."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with FakeMode(), sdpa_kernel([SDPBackend.MATH]):
        found = choose_kernel(*tensors(HALF), None, is_causal=True, enable_gqa=False, capability=(8, 0))
    assert found == "math"


@pytest.mark.parametrize(
    ("options", "capability"),
    [
        ({"is_causal": True}, (8, 0)),
        ({"dropout_p": 0.1}, (8, 0)),
        ({"mask": torch.bool}, (8, 0)),
        ({"mask": torch.float32}, (7, 5)),
        ({"head": 60}, (8, 0)),
    ],
)
@pytest.mark.parametrize("lower", [None, torch.bfloat16, torch.float16])
def test_output_and_gradients_have_the_right_shapes(
    options: dict[str, Any], capability: tuple[int, int], lower: torch.dtype | None
) -> None:
    """Whatever the kernel, the output is like the query, and autocast decides its dtype."""
    from autofit.predict.walk import PythonEngine, SavedTensors
    from autofit.step.precision import autocast

    options = dict(options)
    with FakeMode(), dispatching_as(CUDA, capability):
        query, key, value = tensors(FULL, head=options.pop("head", 64))
        kind = options.pop("mask", None)
        mask = torch.empty(2, 1, 16, 16, dtype=kind, device=CUDA) if kind else None
        engine = PythonEngine(SavedTensors(lambda _: None), on_node=lambda _: None, in_place=True)
        with engine.active():
            if lower is None:
                out = F.scaled_dot_product_attention(query, key, value, mask, **options)
            else:
                with autocast("cuda", lower):
                    out = F.scaled_dot_product_attention(query, key, value, mask, **options)
            out.sum().backward()
    assert out.dtype == (lower or FULL)
    assert out.shape == query.shape
    assert all(tensor.grad is not None and tensor.grad.dtype == FULL for tensor in (query, key, value))


def test_dispatch_is_put_back() -> None:
    """Attention, the lists of foreach types and the answers of `torch.cuda` are the originals afterwards."""
    from torch.optim.optimizer import _foreach_supported_types

    before = F.scaled_dot_product_attention, list(_foreach_supported_types), torch.cuda.is_available
    with pytest.raises(KeyError), dispatching_as(CUDA, (8, 0)):
        raise KeyError
    assert (F.scaled_dot_product_attention, list(_foreach_supported_types), torch.cuda.is_available) == before
