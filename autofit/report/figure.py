"""Pictures as data: what is drawn where, in the figures' own units; `svg` and `png` only paint it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

# What a mark stands for; both painters know a colour for each.
Role = Literal[
    "best",
    "feasible",
    "failed",
    "predicted",
    "front",
    "limit",
    "guide",
    "weights",
    "optimizer_states",
    "gradients",
    "inputs",
    "activations",
    "temporary",
    "micro_step",
    "optimizer",
    "saves",
]
Shape = Literal["star", "dot", "cross", "ring"]


@dataclass(frozen=True)
class Axis:
    """A linear axis from `low` to `high`, in its own units; `ticks` are (value, text), none for no axis."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Mark:
    """One point, with the sentence that a reader gets for it, and a short `label` beside it."""

    x: float
    y: float
    role: Role
    shape: Shape
    says: str
    label: str = ""


@dataclass(frozen=True)
class Line:
    """A line through points, dashed or not."""

    points: tuple[tuple[float, float], ...]
    role: Role
    dashed: bool = False
    label: str = ""


@dataclass(frozen=True)
class Area:
    """What lies between two curves: (x, lower, upper) from left to right, in steps or straight."""

    edges: tuple[tuple[float, float, float], ...]
    role: Role
    says: str


@dataclass(frozen=True)
class Bar:
    """A horizontal bar in row `row` (from 0, downward)."""

    row: int
    start: float
    end: float
    role: Role
    says: str


@dataclass(frozen=True)
class Span:
    """A stretch of the x axis with a name above it, or a short one where there is little room."""

    start: float
    end: float
    name: str
    short: str


@dataclass(frozen=True)
class Figure:
    """A picture: axes, what is drawn, and the same in words. With `rows`, y counts rows from the top."""

    name: str
    title: str
    description: str
    x: Axis
    y: Axis
    rows: tuple[str, ...] = ()
    areas: tuple[Area, ...] = ()
    bars: tuple[Bar, ...] = ()
    spans: tuple[Span, ...] = ()
    lines: tuple[Line, ...] = ()
    marks: tuple[Mark, ...] = ()
    legend: tuple[tuple[Role, Shape | Literal["area", "line", "dashes"], str], ...] = field(default=())


_BYTES = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))


def bytes_axis(label: str, values: Sequence[float], *, from_zero: bool = True) -> Axis:
    """An axis of bytes over `values`, in the unit that suits the largest, with ticks at round numbers of it."""
    unit, factor = next(((unit, factor) for unit, factor in _BYTES if max(values) >= factor), ("B", 1.0))
    axis = number_axis(label, [value / factor for value in values], from_zero=from_zero)
    ticks = tuple((value * factor, text) for value, text in axis.ticks)
    return Axis(f"{label}, {unit}", axis.low * factor, axis.high * factor, ticks)


def number_axis(label: str, values: Sequence[float], *, from_zero: bool = True) -> Axis:
    """An axis over `values`, from zero unless told otherwise, with about five ticks at round numbers."""
    low, high = (0.0 if from_zero else min(values)), max(values)
    span = high - low if high - low > 1e-9 * high else high
    step = _round_step(span / 4 or 1.0)
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    ticks = tuple((step * number, _text(step * number, step)) for number in range(first, last + 1))
    return Axis(label, ticks[0][0], ticks[-1][0], ticks)


def _round_step(wanted: float) -> float:
    """The 1, 2 or 5 times a power of ten at or above what is wanted."""
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= wanted * (1 - 1e-9))


def _text(value: float, step: float) -> str:
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:,.{decimals}f}"
