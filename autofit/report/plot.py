"""Paints a plan's figures with matplotlib, into one picture file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from autofit.errors import ConfigError
from autofit.plan import Plan
from autofit.report.figure import Figure, Role, Shape
from autofit.report.figures import figures

COLOURS: Mapping[Role, str] = {
    "best": "#b8440b",
    "feasible": "#0b62b8",
    "failed": "#8c959f",
    "predicted": "#6f42c1",
    "front": "#6fa3d6",
    "limit": "#c0142b",
    "guide": "#57606a",
    "weights": "#3d6fb6",
    "optimizer_states": "#7d57b8",
    "gradients": "#2a8f7f",
    "inputs": "#a0a7af",
    "activations": "#e08a1e",
    "temporary": "#c9437a",
    "micro_step": "#0b62b8",
    "optimizer": "#7d57b8",
    "saves": "#0b62b8",
}
MARKERS: Mapping[Shape, str] = {"star": "*", "dot": "o", "ring": "o", "cross": "x"}
COLUMNS, WIDTH_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 2, 7.0, 4.2, 144


def plot(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes all pictures of the plan into `path`, of the kind that its ending names: .png, .pdf, .svg.

    Raises ConfigError without matplotlib, for an ending that it does not know, and where nothing can be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: nothing global is touched
        from matplotlib.figure import Figure as Sheet
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ConfigError("plan.plot needs matplotlib: pip install 'torch-autofit[plot]'.") from error
    shown = figures(plan)
    if not shown:
        raise ConfigError("This plan has no trial with a peak, so there is nothing to plot.")
    rows = -(-len(shown) // COLUMNS)
    columns = min(len(shown), COLUMNS)
    sheet = Sheet(
        figsize=(WIDTH_INCHES * columns, HEIGHT_INCHES * rows), layout=ConstrainedLayoutEngine(h_pad=0.15, w_pad=0.15)
    )
    canvas = FigureCanvasAgg(sheet)
    places: Any = sheet.subplots(rows, columns, squeeze=False).flatten()
    for figure, place in zip(shown, places, strict=False):
        _paint(figure, place)
    for place in places[len(shown) :]:
        place.set_axis_off()
    ending = os.path.splitext(os.fspath(path))[1].lstrip(".").lower()
    known = canvas.get_supported_filetypes()
    if ending not in known:
        raise ConfigError(f"plan.plot cannot write {os.fspath(path)!r}: its ending must be one of {', '.join(known)}.")
    try:
        sheet.savefig(path, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise ConfigError(f"The pictures cannot be written to '{os.fspath(path)}': {error.strerror}.") from error


def _paint(figure: Figure, place: Any) -> None:
    place.set_title(figure.title, loc="left", fontsize=11, pad=18 if figure.spans else 8)
    place.spines[["top", "right"]].set_visible(False)
    _axes(figure, place)
    for area in figure.areas:
        x, lower, upper = zip(*area.edges, strict=True)
        place.fill_between(x, lower, upper, color=COLOURS[area.role], linewidth=0.3, edgecolor="white")
    for bar in figure.bars:
        place.barh(bar.row + 0.5, bar.end - bar.start, left=bar.start, height=0.7, color=COLOURS[bar.role])
    for span in figure.spans:
        place.axvline(span.start, color="#57606a", linewidth=0.8, linestyle=":")
        place.text((span.start + span.end) / 2, figure.y.high, span.short, ha="center", va="bottom", fontsize=8)
    for line in figure.lines:
        if line.points:
            x, y = zip(*line.points, strict=True)
            place.plot(x, y, color=COLOURS[line.role], linestyle="--" if line.dashed else "-", linewidth=1.4)
    for mark in figure.marks:
        _mark(mark, place)
    if figure.legend:
        handles = [_handle(role, shape) for role, shape, _ in figure.legend]
        words = [words for *_, words in figure.legend]
        place.legend(
            handles, words, fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3
        )


def _axes(figure: Figure, place: Any) -> None:
    place.set_xlim(figure.x.low, figure.x.high)
    place.set_xlabel(figure.x.label, fontsize=9)
    place.set_xticks([value for value, _ in figure.x.ticks], [text for _, text in figure.x.ticks], fontsize=8)
    if figure.rows:
        place.set_ylim(len(figure.rows), 0)
        names = [name.replace("$", r"\$") for name in figure.rows]
        place.set_yticks([row + 0.5 for row in range(len(names))], names, fontsize=8)
        return
    place.set_ylim(figure.y.low, figure.y.high)
    place.set_ylabel(figure.y.label, fontsize=9)
    place.set_yticks([value for value, _ in figure.y.ticks], [text for _, text in figure.y.ticks], fontsize=8)
    place.grid(color="#d8dee4", linewidth=0.6)
    place.set_axisbelow(True)


def _mark(mark: Any, place: Any) -> None:
    style = _marker(mark.role, mark.shape)
    place.plot([mark.x], [mark.y], linestyle="none", clip_on=False, zorder=3, **style)
    if mark.label:
        text = mark.label.replace("$", r"\$")
        place.annotate(text, (mark.x, mark.y), (-8, 6), textcoords="offset points", ha="right", fontsize=8)


def _marker(role: Role, shape: Shape) -> dict[str, Any]:
    return {
        "marker": MARKERS[shape],
        "markersize": 13 if shape == "star" else 7,
        "markeredgecolor": COLOURS[role],
        "markerfacecolor": "none" if shape == "ring" else COLOURS[role],
    }


def _handle(role: Role, shape: str) -> Any:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if shape == "area":
        return Patch(color=COLOURS[role])
    if shape in ("line", "dashes"):
        return Line2D([], [], color=COLOURS[role], linestyle="--" if shape == "dashes" else "-")
    return Line2D([], [], linestyle="none", **_marker(role, shape))  # type: ignore[arg-type]
