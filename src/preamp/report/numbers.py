"""The table behind each chart, for those who read rather than look; no spike of a long curve is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .charts import BarChart, Chart, ExponentHistogram, HeatMap, LineChart, Points, Series, Span
from .table import Table
from .values import Cell, format_number

ROWS = 50
"""A curve with more points than this is told by so many stretches at most."""

SPELLED = 12
"""So many markers, and shades, are told at most."""


def numbers(chart: Chart) -> Table:
    """What a chart draws, as a table.

    Of a curve with more than `ROWS` points each row tells the smallest and the largest value of a stretch.
    """
    if isinstance(chart, BarChart):
        return _bars(chart)
    if isinstance(chart, HeatMap):
        cells = [(name, *map(chart.cell, row)) for name, row in zip(chart.rows, chart.values, strict=True)]
        return Table(f"{chart.title}: {chart.value_label}", ("", *chart.columns), cells)
    return _lines(chart)


def _bars(chart: BarChart) -> Table:
    columns: list[str] = [""]
    cells: list[list[Cell]] = [[label] for label in chart.labels]
    for bars in chart.series:
        columns.append(bars.name)
        ranged = bars.low is not None and bars.high is not None
        if ranged:
            columns.append(f"{bars.name}, whisker")
        for index, row in enumerate(cells):
            value = bars.values[index]
            row.append(None if value is None else format_number(value, chart.digits))
            if bars.low is not None and bars.high is not None:
                row.append(_range([bars.low[index], bars.high[index]], chart.digits))
    return Table(f"{chart.title}: {chart.value_label}", columns, cells)


def _lines(chart: LineChart | ExponentHistogram) -> Table:
    """A column for each line, one more for its band; a row for each x, or for each stretch of x."""
    places = sorted({x for series in chart.series for x in series.x if x is not None})
    size = -(-len(places) // ROWS) or 1
    stretches = [places[start : start + size] for start in range(0, len(places), size)]
    row_of = {x: index for index, stretch in enumerate(stretches) for x in stretch}
    base = _base(chart)
    cells: list[list[Cell]] = [[base + _range([xs[0], xs[-1]]).replace(" to ", f" to {base}")] for xs in stretches]
    columns = [chart.x_label]
    for series in chart.series:
        for name, parts in _columns(series):
            columns.append(name)
            found: list[list[float | None]] = [[] for _ in stretches]
            for part in parts:
                for x, value in zip(series.x, part, strict=True):
                    if x is not None:
                        found[row_of[x]].append(value)
            for row, values in zip(cells, found, strict=True):
                row.append(_range(values) if values else None)
    notes = [f"A row is a stretch of {size} points, told by its smallest and largest value."] if size > 1 else []
    return Table(f"{chart.title}: {chart.y_label}", columns, cells, notes=(*notes, *_marked(chart)))


def _base(chart: LineChart | ExponentHistogram) -> str:
    """What stands before a place on the x axis."""
    return "2^" if isinstance(chart, ExponentHistogram) else ""


def _columns(series: Series) -> list[tuple[str, Sequence[Points]]]:
    """The line, and its band if it has one."""
    band = [] if series.low is None or series.high is None else [(f"{series.name}, band", (series.low, series.high))]
    return [(series.name, (series.y,)), *band]


def _range(values: Sequence[float | None], digits: int | None = None) -> str:
    """The smallest and the largest value, or the only one; "-" where none is finite."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    ends = (_whole(value) for value in (min(known), max(known)))
    return " to ".join(dict.fromkeys(format_number(end, digits) for end in ends))


def _whole(value: float) -> float:
    """A whole number as an int, which is written in full: a step."""
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _marked(chart: LineChart | ExponentHistogram) -> list[str]:
    """Where the markers and the shades along x are; the first ones of many."""
    markers = chart.markers if isinstance(chart, LineChart) else ()
    marked = [f"{marker.label} {_range([float(marker.x)])}".strip() for marker in markers]
    shaded = [f"{span.label} {_ends(span, _base(chart))}".strip() for span in chart.spans]
    return [
        f"{word} ({chart.x_label}): {', '.join(told[:SPELLED])}"
        + (f" and {len(told) - SPELLED} more." if len(told) > SPELLED else ".")
        for word, told in (("Marked", marked), ("Shaded", shaded)) if told
    ]  # fmt: skip


def _ends(span: Span, base: str) -> str:
    """From where to where a shade goes; an open end is left out."""
    known = [(word, end) for word, end in (("from", span.start), ("to", span.end)) if end is not None]
    return " ".join(f"{word} {base}{_range([float(end)])}" for word, end in known if math.isfinite(end))
