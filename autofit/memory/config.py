"""The constants and options of PyTorch's CUDA caching allocator, and the two size rules that follow from them.

Source of the rules: `c10/core/AllocatorConfig.cpp` and `c10/cuda/CUDACachingAllocator.cpp`, torch 2.5 to 2.14.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autofit.errors import ConfigError
from autofit.units import MiB

MIN_BLOCK = 512  # sizes are multiples of it
SMALL_MAX = MiB  # the largest size that the small pool serves
SMALL_SEGMENT = 2 * MiB
MIN_LARGE = 10 * MiB  # from here on a request gets a segment of its own size
ROUND_LARGE = 2 * MiB
INTERVALS = 16  # powers of two from 1 MiB on, each with its own number of rounding divisions

_logger = logging.getLogger("autofit.memory")
_PAIR = re.compile(r"([^:,\[\]]+):(\[[^\]]*\]|[^:,\[\]]+)(?:,|$)")


@dataclass(frozen=True, kw_only=True)
class AllocatorConfig:
    """Options of the caching allocator that change where blocks go; sizes in bytes.

    Only the default has been compared with recordings of real GPUs. Expandable segments, `max_split_size`, garbage
    collection and rounding divisions follow the source but are not validated.
    """

    large_segment_size: int = 20 * MiB
    max_split_size: int | None = None
    max_non_split_rounding: int | None = None
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    expandable_segments: bool = False

    def __post_init__(self) -> None:
        """Refuses what the real allocator refuses, with a ConfigError."""
        for name in ("max_split_size", "max_non_split_rounding"):
            value = getattr(self, name)
            if value is not None and value < self.large_segment_size:
                raise ConfigError(f"{name} is {value} bytes; it must be at least {self.large_segment_size}.")
        if self.large_segment_size <= MIN_LARGE:
            raise ConfigError(f"large_segment_size is {self.large_segment_size} bytes; it must be above {MIN_LARGE}.")
        if not 0 <= self.garbage_collection_threshold < 1:
            raise ConfigError(
                f"garbage_collection_threshold is {self.garbage_collection_threshold}; it must lie in (0, 1), or be 0 "
                "for none."
            )
        if len(self.roundup_power2_divisions) != INTERVALS:
            raise ConfigError(
                f"roundup_power2_divisions has {len(self.roundup_power2_divisions)} values; one for each of the "
                f"{INTERVALS} powers of two from 1 MiB on is needed."
            )
        for divisions in self.roundup_power2_divisions:
            if divisions < 0 or divisions & (divisions - 1):
                raise ConfigError(f"roundup_power2_divisions holds {divisions}; only 0 and powers of two are allowed.")

    @classmethod
    def parse(cls, text: str) -> AllocatorConfig:
        """Reads a `PYTORCH_ALLOC_CONF` string, such as `'max_split_size_mb:128,expandable_segments:True'`.

        Options without a bearing on device memory are skipped. Raises ConfigError for what is malformed, and for a
        backend other than `native`, whose rules are not these.
        """
        values: dict[str, object] = {}
        for key, value in _pairs(text):
            if key == "backend" and value != "native":
                raise ConfigError(f"The allocator backend {value!r} has rules of its own; only 'native' is modelled.")
            if key in _OPTIONS:
                name, read = _OPTIONS[key]
                try:
                    values[name] = read(value)
                except ValueError:
                    raise ConfigError(
                        f"The value {value!r} of the allocator option {key!r} is not understood."
                    ) from None
            else:
                _logger.debug("allocator option %s: not modelled, skipped", key)
        return cls(**values)  # type: ignore[arg-type]  # each reader returns its field's type

    @property
    def is_default(self) -> bool:
        """Whether these are the rules that recordings of real GPUs have confirmed."""
        return self == DEFAULT_CONFIG

    def round_size(self, nbytes: int) -> int:
        """The block size for a request of `nbytes`: a multiple of 512 B, or the next rounding division above."""
        if nbytes < MIN_BLOCK:
            return MIN_BLOCK
        interval = min(max(nbytes.bit_length() - 21, 0), INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        quantum = MIN_BLOCK
        if divisions > 1 and nbytes > MIN_BLOCK * divisions:
            quantum = (1 << nbytes.bit_length() - 1) // divisions
        return -(-nbytes // quantum) * quantum

    def segment_size(self, size: int) -> int:
        """The bytes asked of the device when no free block can serve a block of `size` bytes."""
        if size <= SMALL_MAX:
            return SMALL_SEGMENT
        if size < MIN_LARGE:
            return self.large_segment_size
        return -(-size // ROUND_LARGE) * ROUND_LARGE


DEFAULT_CONFIG = AllocatorConfig()


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    text = "".join(text.split())
    at = 0
    while at < len(text):
        match = _PAIR.match(text, at)
        if match is None:
            raise ConfigError(
                f"The allocator options {text!r} are not understood from {text[at:]!r} on. Write 'key:value,key:value'."
            )
        yield match[1], match[2]
        at = match.end()


def _mebibytes(text: str) -> int:
    return int(text) * MiB


def _boolean(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError(text)
    return text == "True"


def _divisions(text: str) -> tuple[int, ...]:
    """`'4'` for all intervals, or `'[256:1,512:2,>:8]'`: from a size in MiB on; `>` is all above the last key."""
    if not text.startswith("["):
        return (int(text),) * INTERVALS
    result = [0] * INTERVALS
    last: int | None = None
    for key, value in _pairs(text[1:-1]):
        if key == ">":
            start = 1 if last is None else last + 1
            result[start:] = [int(value)] * (INTERVALS - start)
            continue
        boundary = int(key)
        if boundary <= 0 or boundary & (boundary - 1):
            raise ValueError(key)
        interval = min(boundary.bit_length() - 1, INTERVALS - 1)
        if last is None:
            result[:interval] = [int(value)] * interval
        result[interval] = int(value)
        last = interval
    return tuple(result)


_OPTIONS: dict[str, tuple[str, Callable[[str], object]]] = {
    "large_segment_size_mb": ("large_segment_size", _mebibytes),
    "max_split_size_mb": ("max_split_size", _mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _mebibytes),
    "garbage_collection_threshold": ("garbage_collection_threshold", float),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "expandable_segments": ("expandable_segments", _boolean),
}
