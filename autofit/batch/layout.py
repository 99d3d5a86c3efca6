"""Where the samples of a batch lie, inferred once and used at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autofit.batch.nest import shown_path
from autofit.batch.nodes import Node, Split
from autofit.errors import ConfigError

_NAMES_SHOWN = 8


@dataclass(frozen=True)
class BatchLayout:
    """Where the samples of a batch lie. `samples` is the number in the batch that it was inferred from.

    It serves every batch of the same structure (see `matches`), whatever the number of samples.
    """

    samples: int
    root: Node

    @property
    def dims(self) -> tuple[tuple[str, Split], ...]:
        """For every leaf its path and the dim that is split, `"list"` for a list of samples, None for passed whole."""
        return tuple(self.root.splits())

    def matches(self, batch: Any) -> bool:
        """Whether `batch` has the same structure: containers, keys and numbers of dims; sizes may differ."""
        return self.root.matches(batch)

    def samples_in(self, batch: Any) -> int:
        """The number of samples of another batch of the same structure.

        Raises ConfigError when its leaves disagree or when it is empty.
        """
        counts = dict(self.root.counts(batch))
        distinct = set(counts.values())
        if len(distinct) > 1:
            shown = ", ".join(f"{shown_path(path)} has {count}" for path, count in counts.items())
            raise ConfigError(
                f"The leaves of this batch disagree on the number of samples: {shown}. "
                "Pass batch_dims={path: None} for those that belong to the whole batch."
            )
        samples = distinct.pop()
        if samples == 0:
            raise ConfigError(f"The batch has no samples: {shown_path(next(iter(counts)))} is empty.")
        return samples

    def split(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Consecutive parts of the batch, one for each of `sizes`: views, no copies (packed sequences are repacked).

        Raises ConfigError unless the sizes are positive and add up to `samples_in(batch)`.
        """
        samples = self.samples_in(batch)
        if sum(sizes) != samples or min(sizes, default=0) < 1:
            raise ConfigError(
                f"A batch of {samples} samples was to be split into {list(sizes)} (sum {sum(sizes)}): sizes must be "
                "positive and add up to the samples."
            )
        return list(self.root.split(batch, sizes))

    def resize(self, batch: Any, samples: int) -> Any:
        """The batch with exactly `samples` samples: the first ones of it, or all of them again and again.

        The result is detached from any graph, and its tensors require gradients where the batch's did. Raises
        ConfigError when `samples` is not positive.
        """
        if samples < 1:
            raise ConfigError(f"A batch cannot be resized to {samples} samples; at least 1 is needed.")
        self.samples_in(batch)
        return self.root.resize(batch, samples)

    def describe(self) -> str:
        """One sentence for people: which leaves are split along which dim, and which are passed whole."""
        groups: dict[Split, list[str]] = {}
        for path, split in self.dims:
            groups.setdefault(split, []).append(shown_path(path))
        whole = groups.pop(None, [])
        parts = [
            f"{_some(names)} as a list of samples" if split == "list" else f"{_some(names)} along dim {split}"
            for split, names in groups.items()
        ]
        text = f"The batch is split into samples: {'; '.join(parts)}"
        return f"{text}; passed whole: {_some(whole)}." if whole else f"{text}."


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return f"{shown} and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else shown
