"""A chart to a PNG file by matplotlib (extra `report`), for slides; reports draw their own SVG."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from ..errors import MissingExtra
from .charts import BarChart, Chart, ExponentHistogram, HeatMap, LineChart
from .files import write_with

COLOURS = ("#0a6cb8", "#d1540a", "#00875f", "#b04a8f", "#b37a00", "#3492c9", "#6b6f76", "#7a4fbf")
DASHES = ("-", (0, (6, 1.5)), (0, (6, 1.5, 1, 1.5)), (0, (1.5, 1)), "-.", ":")


def write_png(chart: Chart, path: str | Path, *, dpi: int = 160) -> Path:
    """Draw `chart` on white, 7.6 inches wide, write it to `path` whole or not at all, and return the path.

    Raises `MissingExtra` when matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "report", "drawing a chart as PNG") from error
    rows = len(chart.labels) * (len(chart.series) + 0.8) if isinstance(chart, BarChart) else 0
    if isinstance(chart, HeatMap):
        rows = 1.5 * len(chart.rows)
    with warnings.catch_warnings():  # a glyph that no font has is no reason to stop
        warnings.simplefilter("ignore")
        figure = Figure(figsize=(7.6, max(3.6, 1.4 + 0.2 * rows)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        _text(axes.set_title, chart.title, loc="left", fontsize=11, fontweight="bold")
        if isinstance(chart, BarChart):
            _bars(axes, chart)
        elif isinstance(chart, HeatMap):
            _heat(axes, chart)
        else:
            _lines(axes, chart)
        axes.spines[["top", "right"]].set_visible(False)
        if not isinstance(chart, HeatMap):
            axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        return write_with(path, lambda temporary: figure.savefig(temporary, format="png", dpi=dpi))


def _text(setter: Any, text: str, **style: Any) -> None:
    """Set a title or a label literally: a dollar in a name is no mathematics."""
    setter(fill(" ".join(text.split()), 84), **style).set_parse_math(False)


def _lines(axes: Any, chart: LineChart | ExponentHistogram) -> None:
    """Lines with bands and markers, or the outlines of a histogram."""
    _text(axes.set_xlabel, chart.x_label)
    _text(axes.set_ylabel, chart.y_label)
    histogram = isinstance(chart, ExponentHistogram)
    handles = []
    for index, series in enumerate(chart.series):
        colour = COLOURS[index % len(COLOURS)]
        dash = (0, (4, 3)) if series.dashed else DASHES[index % len(DASHES)]
        style = "steps-post" if histogram or series.steps else "default"
        xs, ys = _floats(series.x), _floats(series.y)
        handles += axes.plot(xs, ys, color=colour, linestyle=dash, drawstyle=style, linewidth=1.6)
        if series.low is not None and series.high is not None:
            low, high = _floats(series.low), _floats(series.high)
            axes.fill_between(xs, low, high, color=colour, alpha=0.16, linewidth=0)
    if chart.y_log:
        axes.set_yscale("log", nonpositive="mask")
    if isinstance(chart, LineChart):
        if chart.x_log:
            axes.set_xscale("log", nonpositive="mask")
        if chart.y_log2:
            axes.set_yscale("log", base=2, nonpositive="mask")
        _markers(axes, chart)
    else:
        axes.xaxis.set_major_formatter(lambda exponent, _: f"$2^{{{exponent:g}}}$")
    if any(span.axis == "x" for span in chart.spans):
        axes.margins(y=0.14)  # room for the labels of the spans
    _spans(axes, chart)
    _legend(axes, handles, chart.series)


def _markers(axes: Any, chart: LineChart) -> None:
    """Labelled points and rules."""
    for marker in chart.markers:
        if not math.isfinite(marker.x) or (marker.y is not None and not math.isfinite(marker.y)):
            continue
        if marker.y is None:
            axes.axvline(marker.x, color="#5d626b", linestyle=":", linewidth=1)
            place, offset = (marker.x, 0.97), (4, -8)
            transform = axes.get_xaxis_transform()
        else:
            axes.plot([marker.x], [marker.y], "o", mfc="white", mec="#1d1f23", zorder=5)
            place, offset, transform = (marker.x, marker.y), (6, 6), axes.transData
        axes.annotate(
            marker.label, place, xycoords=transform, xytext=offset, textcoords="offset points", parse_math=False
        )


def _spans(axes: Any, chart: LineChart | ExponentHistogram) -> None:
    """Shaded ranges; they do not move the limits."""
    limits = {"x": axes.get_xlim(), "y": axes.get_ylim()}
    for span in chart.spans:
        low, high = limits[span.axis]
        start = low if span.start is None else max(low, span.start)
        end = high if span.end is None else min(high, span.end)
        if not start < end:
            continue
        shade = axes.axvspan if span.axis == "x" else axes.axhspan
        shade(start, end, color="#1d1f23", alpha=0.05, linewidth=0)
        across, along = (axes.get_xaxis_transform(), (start, 0.98)), (axes.get_yaxis_transform(), (0.02, end))
        transform, place = across if span.axis == "x" else along
        style = {"fontsize": 8, "color": "#5d626b", "va": "top", "clip_on": True, "parse_math": False}
        axes.text(*place, f" {span.label}", transform=transform, **style)
    axes.set_xlim(*limits["x"])
    axes.set_ylim(*limits["y"])


def _bars(axes: Any, chart: BarChart) -> None:
    """Groups of horizontal bars, the first at the top."""
    _text(axes.set_xlabel, chart.value_label)
    tall = 0.8 / max(len(chart.series), 1)
    handles = []
    for index, bars in enumerate(chart.series):
        places = [group + (index - (len(chart.series) - 1) / 2) * tall for group in range(len(chart.labels))]
        values = _floats(bars.values)
        drawn = axes.barh(places, values, 0.92 * tall, color=COLOURS[index % len(COLOURS)], log=chart.log)
        handles.append(drawn)
        if bars.low is not None and bars.high is not None:
            ends = zip(_floats(bars.low), _floats(bars.high), places, strict=True)
            for low, high, place in ends:
                axes.plot([low, high], [place, place], color="#1d1f23", linewidth=1.1)
    axes.set_yticks(range(len(chart.labels)), chart.labels, parse_math=False)
    axes.invert_yaxis()
    _legend(axes, handles, chart.series)


def _heat(axes: Any, chart: HeatMap) -> None:
    """Shaded cells with their values, the first row at the top."""
    _text(axes.set_xlabel, chart.value_label)
    for number, row in enumerate(chart.values):
        for column, value in enumerate(row):
            shade = 0.0 if value is None else 0.05 + 0.5 * chart.shade(value)
            axes.barh(number, 0.98, 0.94, column - 0.49, color=COLOURS[1], alpha=shade)
            axes.text(column, number, chart.cell(value), ha="center", va="center", fontsize=8, parse_math=False)
    axes.set_xticks(range(len(chart.columns)), chart.columns, parse_math=False)
    axes.set_yticks(range(len(chart.rows)), chart.rows, parse_math=False)
    axes.invert_yaxis()


def _legend(axes: Any, handles: list[Any], series: Sequence[Any]) -> None:
    """A legend of literal names; matplotlib would leave out those that start with an underscore."""
    pairs = [(handle, s.name) for handle, s in zip(handles, series, strict=True) if s.name]
    if not pairs:
        return
    legend = axes.legend([handle for handle, _ in pairs], ["name"] * len(pairs), frameon=False, fontsize=9)
    for text, (_, name) in zip(legend.get_texts(), pairs, strict=True):
        text.set_parse_math(False)
        text.set_text(" ".join(name.split()))


def _floats(values: Sequence[float | None]) -> list[float]:
    """Gaps as nan, which matplotlib leaves out."""
    return [math.nan if value is None else value for value in values]
