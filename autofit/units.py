"""Bytes and seconds, as people write and read them. GiB is 1024³; GB is 1000³."""

from __future__ import annotations

import re

from autofit.errors import ConfigError

KiB = 1024
MiB = 1024**2
GiB = 1024**3

_FACTORS = {
    "b": 1,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": 1024**4,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
}
_SIZE = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*([A-Za-z%]*)\s*$")
_ALLOWED = "'8GiB', '400MiB', '8GB', a number of bytes, a fraction such as 0.9, or '90%'"


def parse_bytes(text: str) -> int:
    """Bytes of a size with a unit, such as `'8GiB'` or `'1.5 GB'`; raises ConfigError for anything else."""
    match = _SIZE.match(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{text!r} is not a size in bytes. Allowed: {_ALLOWED}.")
    return round(float(match[1]) * factor)


def parse_budget(budget: str | int | float, *, total_bytes: int) -> int:
    """Bytes of a memory budget: a size (`'8GiB'`), bytes (8589934592), or a fraction of `total_bytes` (0.9, `'90%'`).

    Raises ConfigError when the budget is not positive or lies above `total_bytes`.
    """
    requested = _requested_bytes(budget, total_bytes)
    if requested <= 0:
        raise ConfigError(f"A budget must be positive, got {budget!r}. Allowed: {_ALLOWED}.")
    if requested > total_bytes:
        raise ConfigError(
            f"The budget {budget!r} ({format_bytes(requested)}) is above what the device has, "
            f"{format_bytes(total_bytes)}. "
            f"Leave it out to use what is free now, or pass at most {format_bytes(total_bytes)}."
        )
    return requested


def _requested_bytes(budget: str | int | float, total_bytes: int) -> int:
    if isinstance(budget, bool) or not isinstance(budget, (str, int, float)):
        raise ConfigError(f"A budget of type {type(budget).__name__} is not understood. Allowed: {_ALLOWED}.")
    if isinstance(budget, str):
        match = _SIZE.match(budget)
        if match is None or match[2].lower() not in ("", "%"):
            return parse_bytes(budget)
        number = float(match[1])
        if match[2] == "%":
            budget = number / 100
        else:
            budget = number if "." in match[1] else int(match[1])
    if isinstance(budget, int):
        if budget == 1:
            raise ConfigError(f"The budget 1 is ambiguous: write 1.0 for all of the device. Allowed: {_ALLOWED}.")
        return budget
    if not 0 < budget <= 1:
        raise ConfigError(f"The fraction {budget!r} is not in (0, 1]. Allowed: {_ALLOWED}.")
    return int(budget * total_bytes)


def format_bytes(count: int | float) -> str:
    """A size for people: `'512 B'`, `'8.1 MiB'`, `'7.9 GiB'`."""
    for unit, factor in (("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """A duration for people: `'850 µs'`, `'12.3 ms'`, `'4.56 s'`, `'3 min 20 s'`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"
