"""Selective recomputation: the results of operators that are too dear to run twice are kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from autofit.kept_operators import KEPT_OPERATORS

# Packets, so that every overload counts; a version of torch may lack some.
_KEPT = frozenset(getattr(torch.ops.aten, name) for name in KEPT_OPERATORS if hasattr(torch.ops.aten, name))


def is_kept(operator: Any) -> bool:
    """Whether selective recomputation keeps what the operator gives, rather than to run it again."""
    return getattr(operator, "overloadpacket", None) in _KEPT


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(operator) else CheckpointPolicy.PREFER_RECOMPUTE


# What `torch.utils.checkpoint.checkpoint` takes as `context_fn`.
selective_contexts: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] = partial(
    create_selective_checkpoint_contexts, _policy
)
