"""What `--model` stands for, once it is loaded."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Workload:
    """A model, a small batch to run it on, and the arguments of `tune` that come with them.

    `description` says for people what the batch is, such as `3 × 224 × 224 images, 1000 classes`.
    """

    model: nn.Module
    sample_batch: Any
    description: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


def near_misses(name: str, known: Collection[str]) -> str:
    """A sentence with the known names that look like `name`; empty when none does."""
    found = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(match) for match in found)}?" if found else ""


def refuse_option(option: str, value: int | None, *, of: str, because: str) -> None:
    """Raises ConfigError when an option was given that `of` has no use for, rather than ignore it silently."""
    from autofit.errors import ConfigError

    if value is not None:
        raise ConfigError(f"{option} {value} does not apply to {of}: {because}. Leave {option} out.")
