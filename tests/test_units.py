"""Sizes and budgets as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.errors import ConfigError
from autofit.units import GiB, MiB, format_bytes, format_seconds, parse_budget, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 * GiB),
        ("8 gib", 8 * GiB),
        ("1.5MiB", 3 * MiB // 2),
        ("8GB", 8_000_000_000),
        ("512B", 512),
        (" 400MiB ", 400 * MiB),
        (".5GiB", GiB // 2),
    ],
)
def test_parse_bytes(text: str, expected: int) -> None:
    """GiB is 1024³ and GB is 1000³; case and spaces do not matter."""
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "8", "8 apples", "GiB", "-1GiB", "8GiB4", "1e3MiB"])
def test_parse_bytes_refuses(text: str) -> None:
    """What is no size with a unit says so, with what is allowed."""
    with pytest.raises(ConfigError, match=r"8GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("8GiB", 8 * GiB),
        (123456, 123456),
        ("123456", 123456),
        (0.5, 8 * GiB),
        ("50%", 8 * GiB),
        ("0.5", 8 * GiB),
        (1.0, 16 * GiB),
    ],
)
def test_parse_budget(budget: str | int | float, expected: int) -> None:
    """A size, bytes, a fraction or a percentage of a device of 16 GiB."""
    assert parse_budget(budget, total_bytes=16 * GiB) == expected


@pytest.mark.parametrize("budget", ["17GiB", 0, -5, "0%", 1.5, 0.0, True, None, 1, "1", "x", [8]])
def test_parse_budget_refuses(budget: object) -> None:
    """A budget above the device, not positive, ambiguous or of another type is refused."""
    with pytest.raises(ConfigError):
        parse_budget(budget, total_bytes=16 * GiB)  # type: ignore[arg-type]


@given(st.integers(min_value=0, max_value=2**50))
def test_formatted_bytes_read_back(count: int) -> None:
    """What is shown lies within half a tenth of the unit shown."""
    shown = format_bytes(count)
    number, unit = shown.split()
    factor = {"B": 1, "KiB": 1024, "MiB": MiB, "GiB": GiB}[unit]
    assert abs(float(number) * factor - count) <= 0.0501 * factor


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.00085, "850 µs"), (0.0123, "12.3 ms"), (4.56, "4.56 s"), (200, "3 min 20 s")]
)
def test_format_seconds(seconds: float, shown: str) -> None:
    """Durations in the unit that a person would use."""
    assert format_seconds(seconds) == shown
