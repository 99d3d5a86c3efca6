"""Paints a figure as SVG, to stand inside a page: colours come from the page's style, by the marks' roles."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree as ET

from autofit.report.figure import Area, Axis, Bar, Figure, Line, Mark, Shape, Span

WIDTH, HEIGHT = 720, 360
ROW_HEIGHT = 26
TOP, RIGHT, BOTTOM, LEFT, LEFT_OF_ROWS = 46, 20, 44, 66, 220
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
LONGEST_ROW = 32
CHARACTER = 6.5  # of the page's type, on average


def printable(text: str) -> str:
    """The text without what no page may contain: control characters and halves of characters."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def svg(figure: Figure) -> str:
    """The figure as one `<svg>` element with a title and a description for those who do not see it."""
    return _Painting(figure).text()


class _Painting:
    def __init__(self, figure: Figure) -> None:
        self._figure = figure
        self._left = LEFT_OF_ROWS if figure.rows else LEFT
        self._top = TOP if figure.y.label else TOP // 2
        height = self._top + BOTTOM + ROW_HEIGHT * len(figure.rows) if figure.rows else HEIGHT
        self._bottom = height - BOTTOM
        names = f"{figure.name}-title {figure.name}-desc"
        self._root = ET.Element(
            "svg", {"viewBox": f"0 0 {WIDTH} {height}", "role": "img", "aria-labelledby": names, "class": "figure"}
        )
        for tag, text in (("title", figure.title), ("desc", figure.description)):
            ET.SubElement(self._root, tag, {"id": f"{figure.name}-{tag}"}).text = printable(text)

    def text(self) -> str:
        figure = self._figure
        self._axes()
        for area in figure.areas:
            self._area(area)
        for bar in figure.bars:
            self._bar(bar)
        for span in figure.spans:
            self._span(span)
        for line in figure.lines:
            self._line(line)
        for mark in figure.marks:
            self._mark(mark)
        return ET.tostring(self._root, encoding="unicode")

    def _x(self, value: float) -> float:
        return _place(value, self._figure.x, self._left, WIDTH - RIGHT)

    def _y(self, value: float) -> float:
        return _place(value, self._figure.y, self._bottom, self._top)

    def _axes(self) -> None:
        figure = self._figure
        for value, label in figure.x.ticks:
            at = self._x(value)
            self._add("line", "grid", x1=at, x2=at, y1=self._top, y2=self._bottom)
            self._write(label, "tick", at, self._bottom + 16, "middle")
        for value, label in figure.y.ticks:
            at = self._y(value)
            self._add("line", "grid", x1=self._left, x2=WIDTH - RIGHT, y1=at, y2=at)
            self._write(label, "tick", self._left - 8, at + 4, "end")
        for row, label in enumerate(figure.rows):
            short = label if len(label) <= LONGEST_ROW else f"{label[: LONGEST_ROW - 1]}…"
            self._write(short, "row", self._left - 8, self._top + (row + 0.5) * ROW_HEIGHT + 4, "end")
        self._add("line", "axis", x1=self._left, x2=WIDTH - RIGHT, y1=self._bottom, y2=self._bottom)
        self._write(figure.x.label, "label", (self._left + WIDTH - RIGHT) / 2, self._bottom + 36, "middle")
        self._write(figure.y.label, "label", 4, 14, "start")

    def _area(self, area: Area) -> None:
        upper = [f"{self._x(x):.1f},{self._y(high):.1f}" for x, _, high in area.edges]
        lower = [f"{self._x(x):.1f},{self._y(low):.1f}" for x, low, _ in reversed(area.edges)]
        self._say(self._add("polygon", f"fill {area.role}", points=" ".join(upper + lower)), area.says)

    def _bar(self, bar: Bar) -> None:
        start, end = self._x(bar.start), self._x(bar.end)
        top = self._top + bar.row * ROW_HEIGHT + 4
        element = self._add(
            "rect", f"fill {bar.role}", x=start, y=top, width=max(end - start, 0.0), height=ROW_HEIGHT - 8
        )
        self._say(element, bar.says)

    def _span(self, span: Span) -> None:
        start, end = self._x(span.start), self._x(span.end)
        self._add("line", "phase", x1=start, x2=start, y1=self._top - 4, y2=self._bottom)
        for name in (span.name, span.short):
            if end - start > CHARACTER * len(name):
                self._write(name, "phase", (start + end) / 2, self._top - 8, "middle")
                break

    def _line(self, line: Line) -> None:
        points = [(self._x(x), self._y(y)) for x, y in line.points]
        if not points:
            return
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._add("polyline", f"line {line.role}{' dashed' if line.dashed else ''}", points=text)
        x, y = points[-1]
        upright = points[0][0] == x
        if upright and x < WIDTH - 80:
            self._write(line.label, f"label on {line.role}", x + 5, y + 12, "start")
        else:
            below = upright or y < self._top + 12
            self._write(line.label, f"label on {line.role}", x - 5, y + 13 if below else y - 5, "end")

    def _mark(self, mark: Mark) -> None:
        x, y = self._x(mark.x), self._y(mark.y)
        self._say(self._add("path", f"mark {mark.role} {mark.shape}", d=outline(mark.shape, x, y)), mark.says)
        if mark.label:
            right = x < (self._left + WIDTH) / 2
            self._write(
                mark.label, f"label on {mark.role}", x + 11 if right else x - 11, y - 9, "start" if right else "end"
            )

    def _add(self, tag: str, style: str, **attributes: float | str) -> ET.Element:
        texts = {name: value if isinstance(value, str) else f"{value:.1f}" for name, value in attributes.items()}
        return ET.SubElement(self._root, tag, {"class": style, **texts})

    def _write(self, text: str, style: str, x: float, y: float, anchor: str) -> None:
        if text:
            element = self._add("text", style, x=x, y=y)
            element.set("text-anchor", anchor)
            element.text = printable(text)

    def _say(self, element: ET.Element, text: str) -> None:
        ET.SubElement(element, "title").text = printable(text)


def _place(value: float, axis: Axis, start: float, end: float) -> float:
    share = (value - axis.low) / (axis.high - axis.low) if axis.high > axis.low else 0.0
    return start + share * (end - start)


def outline(shape: Shape, x: float, y: float) -> str:
    """The path of a mark around a point."""
    if shape == "cross":
        return f"M{x - 4:.1f},{y - 4:.1f}l8,8m0,-8l-8,8"
    if shape == "star":
        tips = [(8 if tip % 2 == 0 else 3.6, math.pi * tip / 5 - math.pi / 2) for tip in range(10)]
        corners = (f"{x + r * math.cos(angle):.1f},{y + r * math.sin(angle):.1f}" for r, angle in tips)
        return f"M{' '.join(corners)}z"
    return f"M{x - 4.5:.1f},{y:.1f}a4.5,4.5 0 1 0 9,0a4.5,4.5 0 1 0 -9,0z"
