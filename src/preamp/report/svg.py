"""Charts to inline SVG: lines, bands, markers, exponent histograms. Bars and heat maps are in `bars.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise

from .axis import Axis, fit
from .bars import draw_bars, draw_heat
from .charts import BarChart, Chart, ExponentHistogram, HeatMap, LineChart, Marker, Series
from .frame import NARROW, Box, Frame, build_frame, series_style
from .markup import FONT, Element, element, label, path, text_width

Point = tuple[float, float] | None
"""A point in axis coordinates, or None for a gap."""

WIDE_WIDTH = 760.0
NARROW_WIDTH = 390.0


def to_svg(chart: Chart, width: float = WIDE_WIDTH, *, screen: str = "") -> str:
    """`chart` as one <svg> element with a view box of this width; the height follows from what is in it.

    The page that it goes into must have the rules of `chart.css`. Below 500 it has the layout for a phone; `screen`
    ("wide", "narrow") is where a page shows it, if that does not follow from its width.
    """
    if isinstance(chart, BarChart):
        parts, height = draw_bars(chart, width)
    elif isinstance(chart, HeatMap):
        parts, height = draw_heat(chart, width)
    elif isinstance(chart, ExponentHistogram):
        parts, height = _draw_histogram(chart, width)
    else:
        parts, height = _draw_lines(chart, width)
    return element(
        "svg",
        element("title", chart.title or "chart"),
        element("desc", chart.to_text()),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        role="img",
        aria_label=chart.title or "chart",
        class_=screen or ("narrow" if width < NARROW else "wide"),
    ).render()


@lru_cache(maxsize=1)
def chart_css() -> str:
    """The style sheet of a chart: colours for light, dark and print, and nothing loaded from anywhere."""
    return files("preamp.report").joinpath("chart.css").read_text(encoding="utf-8")


def _draw_lines(chart: LineChart, width: float) -> tuple[list[Element], float]:
    """A line chart's elements and its height."""
    narrow = width < NARROW
    x_values = [value for series in chart.series for value in series.x]
    x_values += [marker.x for marker in chart.markers]
    y_values = [v for s in chart.series for part in (s.y, s.low, s.high) if part is not None for v in part]
    y_values += [marker.y for marker in chart.markers]
    x = fit(x_values, "log10" if chart.x_log else "linear", ticks=_ticks(x_values, 4 if narrow else 7), pad=0.015)
    y = fit(y_values, "log2" if chart.y_log2 else "linear", ticks=5, pad=0.06)
    frame = _frame(chart, width, x, y)
    limit = int(width * 0.8)
    parts = list(frame.behind)
    for index, series in enumerate(chart.series):
        parts += _band(series, frame, f"s{index % 8}", limit)
    drawn: list[list[tuple[float, float]]] = []
    for index, series in enumerate(chart.series):
        stretches = _placed(series, frame, limit)
        parts += _line(stretches, series_style(index, series.dashed))
        drawn += stretches
    parts += _draw_markers(chart.markers, frame, drawn)
    return parts, frame.height


def _ticks(values: Sequence[float | None], most: int) -> int:
    """How many ticks: no more than there are steps, so that none lies between two."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known or not all(value % 1 == 0 for value in known):
        return most
    return int(min(most, max(1, max(known) - min(known))))


def _frame(chart: LineChart | ExponentHistogram, width: float, x: Axis, y: Axis) -> Frame:
    labels = {"x_label": chart.x_label, "y_label": chart.y_label}
    return build_frame(width, x, y, **labels, entries=_entries(chart), spans=chart.spans)


def _entries(chart: LineChart | ExponentHistogram) -> list[tuple[str, str]]:
    """The legend; a single series whose name the title or the y label says already needs none."""
    said = f"{chart.title} {chart.y_label}".lower()
    if len(chart.series) == 1 and chart.series[0].name.lower() in said:
        return []
    return [(s.name, series_style(i, s.dashed)) for i, s in enumerate(chart.series)]


def _points(xs: Sequence[float | None], ys: Sequence[float | None], x: Axis, y: Axis) -> list[Point]:
    """The points in axis coordinates, None where either has no place."""
    points: list[Point] = []
    for x_value, y_value in zip(xs, ys, strict=True):
        a, b = x.transform(x_value), y.transform(y_value)
        points.append(None if a is None or b is None else (a, b))
    return points


def _placed(series: Series, frame: Frame, limit: int) -> list[list[tuple[float, float]]]:
    """The stretches of one series in the drawing's coordinates, thinned; `steps` with their corners."""
    x, y = frame.x, frame.y
    stretches = []
    for run in runs(thin(_points(series.x, series.y, x, y), limit)):
        line = [(x.at(a), y.at(b)) for a, b in run]
        if series.steps and len(line) > 1:
            corners = [((x1, y0), (x1, y1)) for (_, y0), (x1, y1) in pairwise(line)]
            line = [line[0], *(point for pair in corners for point in pair)]
        stretches.append(line)
    return stretches


def _line(stretches: list[list[tuple[float, float]]], style: str) -> list[Element]:
    """One series as a path, its lone points as dots."""
    lines = "".join(path(line) for line in stretches if len(line) > 1)
    dots = "".join(path([line[0], line[0]]) for line in stretches if len(line) == 1)
    pieces = []
    if lines:
        pieces.append(element("path", d=lines, class_=f"line {style}"))
    if dots:
        pieces.append(element("path", d=dots, class_=f"dot {style.split()[0]}"))
    return pieces


def _band(series: Series, frame: Frame, style: str, limit: int) -> list[Element]:
    """The area between `low` and `high`; on a log axis a low end that is not positive reaches the bottom."""
    if series.low is None or series.high is None:
        return []
    x, y = frame.x, frame.y
    highs = _points(series.x, series.high, x, y)
    lows: list[Point] = []
    for x_value, value, top in zip(series.x, series.low, highs, strict=True):
        a, b = x.transform(x_value), y.transform(value)
        bottom = y.low if b is None and value is not None else b
        lows.append(None if a is None or bottom is None or top is None else (a, bottom))
    highs = [None if low is None else high for low, high in zip(lows, highs, strict=True)]
    total = max(len(lows), 1)
    shapes = []
    for low_run, high_run in zip(runs(lows), runs(highs), strict=True):
        if len(low_run) == 1:
            continue
        share = max(6, limit * len(low_run) // total)
        edge = thin(high_run, share) + thin(low_run, share)[::-1]
        shapes.append(path([(x.at(p[0]), y.at(p[1])) for p in edge if p is not None], close=True))
    return [element("path", d="".join(shapes), class_=f"band {style}")] if shapes else []


def _draw_histogram(chart: ExponentHistogram, width: float) -> tuple[list[Element], float]:
    """An exponent histogram's elements and its height."""
    narrow = width < NARROW
    edges = [e for s in chart.series for v in s.x if v is not None for e in (v, v + 1)]
    counts = [v for series in chart.series for v in series.y]
    x = fit(edges, "exponent", ticks=6 if narrow else 11, pad=0.01)
    y = fit(counts, "linear", ticks=5, zero=True, pad=0.06)
    frame = _frame(chart, width, x, y)
    parts = list(frame.behind)
    base = frame.y.project(0.0)
    assert base is not None
    for index, series in enumerate(chart.series):
        shapes = [path(shape) for shape in _steps(series, frame, base)]
        if shapes:
            parts.append(element("path", d="".join(shapes), class_=f"band {series_style(index).split()[0]}"))
            parts.append(element("path", d="".join(shapes), class_=f"line {series_style(index, series.dashed)}"))
    return parts, frame.height


def _steps(series: Series, frame: Frame, base: float) -> list[list[tuple[float, float]]]:
    """The outline over each stretch of neighbouring bins, from the base line and back to it."""
    bins: dict[float, float] = {}
    for exponent, value in zip(series.x, series.y, strict=True):
        at = frame.y.project(value)
        if exponent is not None and frame.x.transform(exponent) is not None and at is not None:
            bins[exponent] = at
    shapes: list[list[tuple[float, float]]] = []
    previous = None
    for exponent in sorted(bins):
        left, right, at = frame.x.project(exponent), frame.x.project(exponent + 1), bins[exponent]
        assert left is not None
        right = frame.right if right is None else right
        if previous is None or exponent != previous + 1:
            shapes.append([(left, base)])
        else:
            shapes[-1].pop()
        shapes[-1] += [(left, at), (right, at), (right, base)]
        previous = exponent
    return shapes


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """About `limit` of `points` at most, with the first, the last, and the extremes of each stretch kept.

    The points are cut into stretches of equal count; of each, the lowest, the highest and one gap (if any)
    stay, in their order. So the smallest and the largest y of all survive, and a gap never closes.
    """
    if len(points) <= limit:
        return list(points)
    buckets = max(1, limit // 3)
    kept = {0, len(points) - 1}
    for bucket in range(buckets):
        start, stop = bucket * len(points) // buckets, (bucket + 1) * len(points) // buckets
        lowest = highest = gap = None
        low = high = 0.0
        for index in range(start, stop):
            point = points[index]
            if point is None:
                gap = index if gap is None else gap
                continue
            if lowest is None or point[1] < low:
                lowest, low = index, point[1]
            if highest is None or point[1] > high:
                highest, high = index, point[1]
        kept.update(index for index in (lowest, highest, gap) if index is not None)
    return [points[index] for index in sorted(kept)]


def runs(points: Sequence[Point]) -> list[list[tuple[float, float]]]:
    """The stretches of `points` between gaps, none of them empty."""
    found: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if point is None:
            found.append([])
        else:
            found[-1].append(point)
    return [run for run in found if run]


# -- markers, with labels that cover neither each other nor, if possible, a line

MOST = 200
"""So many markers are drawn at most, evenly chosen; a report stays small however many steps were skipped."""

_CELL = 5.0
_AWAY = 20.0
_DROPS = (-9.0, 17.0, -24.0, 32.0, -39.0, 47.0, -54.0, 62.0)

Cells = set[tuple[int, int]]


def _draw_markers(markers: Sequence[Marker], frame: Frame, lines: Sequence[list[tuple[float, float]]]) -> list[Element]:
    """A ring or a rule for each marker, and its label where there is room; all labels are shown on hover.

    `lines` are the drawn lines in the drawing's coordinates, which labels keep off where they can.
    """
    if len(markers) > MOST:
        markers = [markers[index * len(markers) // MOST] for index in range(MOST)]
    inked = _ink(lines)
    shapes: list[Element] = []
    labels: list[Element] = []
    taken: list[Box] = []
    anchors: list[tuple[str, float, float, bool]] = []
    for marker in markers:
        x, y = frame.x.project(marker.x), frame.y.project(marker.y)
        if x is None or (y is None and marker.y is not None):
            continue
        hover = element("title", marker.label or "marker")
        if y is None:
            shapes.append(element("line", hover, x1=x, y1=frame.top, x2=x, y2=frame.bottom, class_="marker rule"))
            taken.append((x - 1, frame.top, x + 1, frame.bottom))
            anchors.append((marker.label, x, frame.top + 4, False))
        else:
            shapes.append(element("circle", hover, cx=x, cy=y, r=4, class_="marker"))
            taken.append((x - 5, y - 5, x + 5, y + 5))
            anchors.append((marker.label, x, y, True))
    for text, x, y, ring in anchors:
        placed = _place(text, (x, y), ring, frame, taken, inked) if text else None
        if placed is not None:
            labels.append(placed)
    return labels + shapes


def _ink(lines: Sequence[list[tuple[float, float]]]) -> Cells:
    """The cells of a coarse grid that the lines pass through."""
    cells: Cells = set()
    for line in lines:
        for index, (x, y) in enumerate(line):
            x0, y0 = line[index - 1] if index else (x, y)
            steps = math.ceil(max(abs(x - x0), abs(y - y0)) / _CELL) or 1
            for step in range(steps + 1):
                share = step / steps
                cells.add((int((x0 + (x - x0) * share) // _CELL), int((y0 + (y - y0) * share) // _CELL)))
    return cells


def _place(
    text: str, anchor: tuple[float, float], ring: bool, frame: Frame, taken: list[Box], inked: Cells
) -> Element | None:
    """The label beside its point, at the first free place, best one without ink; far from a ring with a line to it."""
    x, y = anchor
    room = frame.right - frame.left - 16
    wide = min(text_width(text), room)
    free: list[tuple[float, float, Box]] = []
    for drop in _DROPS:
        for left in (x + 7, x - 7 - wide, x - wide / 2):
            box = (left, y + drop - FONT, left + wide, y + drop + 3)
            inside = box[0] >= frame.left and box[2] <= frame.right
            inside = inside and box[1] >= frame.top and box[3] <= frame.bottom
            if inside and not any(_touch(box, other) for other in taken):
                free.append((left, y + drop, box))
    if not free:
        return None
    left, baseline, box = next((place for place in free if not _covers(place[2], inked)), free[0])
    taken.append(box)
    shown = label(text, room + 1, x=left, y=baseline, class_="halo")
    if not ring or abs(baseline - y) < _AWAY:
        return shown
    end = (min(max(x, box[0]), box[2]), box[3] if baseline < y else box[1] + 2)
    return element("g", element("path", d=path([(x, y), end]), class_="leader"), shown)


def _touch(a: Box, b: Box) -> bool:
    """Whether two boxes overlap."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _covers(box: Box, inked: Cells) -> bool:
    """Whether a line passes through the box."""
    left, top, right, bottom = (int(edge // _CELL) for edge in box)
    return any((x, y) in inked for x in range(left, right + 1) for y in range(top, bottom + 1))
