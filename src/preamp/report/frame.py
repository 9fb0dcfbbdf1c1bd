"""What surrounds the data of a chart: axis titles, legend, span labels, grid, ticks; nothing touches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from .axis import Axis, Tick
from .charts import Span
from .markup import FONT, Element, element, label, path, text_width

COLOURS = 8
DASHES = 6
NARROW = 500.0
"""Below this width a drawing has the layout for a phone."""

LANE = 18.0
SMALL = 11.0


Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


_Lane = tuple[float, float, float, Element]
"""An x span: start and end, the height of its bar, and its label."""

Swatch = Callable[[float, float], Element]
"""What shows in a legend how a series is drawn, at a left and a top."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The plot's rectangle, its axes placed in it, everything drawn behind the data, and where its texts lie."""

    width: float
    height: float
    left: float
    top: float
    right: float
    bottom: float
    x: Axis
    y: Axis
    behind: tuple[Element, ...]


def series_style(index: int, dashed: bool = False) -> str:
    """The classes that give series `index` its colour and its dash pattern."""
    return f"s{index % COLOURS} {'dashed' if dashed else f'd{index % DASHES}'}"


def build_frame(
    width: float,
    x: Axis,
    y: Axis,
    *,
    x_label: str,
    y_label: str,
    entries: Sequence[tuple[str, str]] = (),
    spans: Sequence[Span] = (),
) -> Frame:
    """Lay out a chart of this width: y title, legend, span labels, plot, ticks, x title, from the top.

    `entries`: names and styles of the legend.
    """
    narrow = width < NARROW
    labels = [text_width(tick.label) for tick in y.ticks]
    left = min(max([24.0, *labels]), 0.3 * width) + 12
    last = max((text_width(tick.label) / 2 for tick in x.ticks), default=0.0)
    right = width - max(10.0, min(last, 24.0))
    x = x.place(left, right)
    behind: list[Element] = []
    top = 4.0
    if y_label:
        behind.append(label(y_label, width - 8, x=4, y=top + FONT, class_="name"))
        top += 20
    lines = [(name, partial(_line, style)) for name, style in entries if name]
    if lines:
        pieces, top = legend(lines, 24, width, top)
        behind += pieces
    lanes, plot_top = _lanes(spans, x, top)
    plot_top += 4 if lanes else 8
    bottom = plot_top + (170 if narrow else 230)
    y = y.place(bottom, plot_top)
    behind += _shades(lanes, bottom)
    behind += _grid(x, y, left, plot_top, right, bottom)
    title, height = axis_title(x_label, left, right, bottom + 22)
    behind += title
    return Frame(width, height, left, plot_top, right, bottom, x, y, tuple(behind))


def _line(style: str, x: float, y: float) -> Element:
    return element("path", d=path([(x, y + 8), (x + 24, y + 8)]), class_=f"line {style}")


def legend(entries: Sequence[tuple[str, Swatch]], wide: float, width: float, y: float) -> tuple[list[Element], float]:
    """Swatches, each so wide, with names, in as many rows as needed; and where they end."""
    pieces: list[Element] = []
    x, room = 4.0, width - wide - 24
    for name, swatch in entries:
        used = wide + 6 + min(text_width(" ".join(name.split())), room) + 16
        if x > 4 and x + used - 16 > width - 4:
            x, y = 4.0, y + 19
        pieces += [swatch(x, y), label(name, room, x=x + wide + 6, y=y + 12)]
        x += used
    return pieces, y + 22


def _lanes(spans: Sequence[Span], x: Axis, top: float) -> tuple[list[_Lane], float]:
    """The spans that can be seen, on the first lane with room, or below if they have no label; and where lanes end."""
    taken: list[list[tuple[float, float]]] = []
    placed: list[_Lane] = []
    mute: list[tuple[float, float]] = []
    for span in spans:
        ends = _ends(span, x)
        if ends is None:
            continue
        start, end = ends
        if not span.label:
            mute.append(ends)
            continue
        half = min(text_width(span.label, SMALL), x.end - x.start - 12) / 2 + 5
        middle = min(max((start + end) / 2, x.start + half), x.end - half)
        first, last = min(start, middle - half), max(end, middle + half)
        free = (i for i, lane in enumerate(taken) if all(last <= a + 0.5 or b - 0.5 <= first for a, b in lane))
        index = next(free, len(taken))
        if index == len(taken):
            taken.append([])
        taken[index].append((first, last))
        base = top + (index + 1) * LANE - 4
        text = label(span.label, 2 * half - 8, x=middle, y=base - 4, size=SMALL, class_="small", text_anchor="middle")
        placed.append((start, end, base, text))
    below = top + len(taken) * LANE
    return [*placed, *((start, end, below, element("g")) for start, end in mute)], below


def _shades(lanes: Sequence[_Lane], bottom: float) -> list[Element]:
    """Each x span as a shaded range, under a bar with its label."""
    pieces = [
        element("rect", x=start, y=base, width=end - start, height=bottom - base, class_="span")
        for start, end, base, _ in lanes
    ]
    for start, end, base, text in lanes:
        wide = max(end - start - 1, 1.0)
        pieces += [element("rect", x=start + 0.5, y=base, width=wide, height=2, class_="lane"), text]
    return pieces


def _ends(span: Span, axis: Axis) -> tuple[float, float] | None:
    """Where a span starts and ends in the drawing, or None when it lies wholly outside the axis."""
    coordinates: list[float] = []
    for value, edge in ((span.start, axis.low), (span.end, axis.high)):
        if value is None or math.isnan(value):
            coordinates.append(edge)
        elif math.isinf(value):
            coordinates.append(axis.high if value > 0 else axis.low)
        else:
            coordinate = axis.transform(value)
            # on a log axis what is not positive lies below everything
            beyond = axis.high if value > 0 else axis.low
            coordinates.append(beyond if coordinate is None else coordinate)
    first, last = min(coordinates), max(coordinates)
    if last < axis.low or first > axis.high or axis.at(first) == axis.at(last):
        return None
    return axis.at(first), axis.at(last)


def _grid(x: Axis, y: Axis, left: float, top: float, right: float, bottom: float) -> list[Element]:
    """Grid lines and tick labels; labels that would touch are left out."""
    pieces: list[Element] = []
    for tick in y.ticks:
        at = y.at(tick.at)
        pieces.append(rule(left, at, right, at, "grid" if tick.label else "grid minor"))
        if tick.label:
            pieces.append(label(tick.label, left - 8, x=left - 8, y=at + 4, text_anchor="end", class_="tick"))
    for tick in x.ticks:
        at = x.at(tick.at)
        pieces.append(rule(at, top, at, bottom, "grid" if tick.label else "grid minor"))
    return [*pieces, *tick_labels(x, bottom, right + 24), rule(left, bottom, right, bottom, "axis")]


def tick_labels(x: Axis, bottom: float, end: float) -> list[Element]:
    """The labels under a horizontal axis, none beyond the drawing's edges."""
    pieces = []
    for tick in apart(x):
        half = text_width(tick.label) / 2
        at = min(max(x.at(tick.at), half), end - half)
        pieces.append(element("text", tick.label, x=at, y=bottom + 17, text_anchor="middle", class_="tick"))
    return pieces


def axis_title(text: str, left: float, right: float, height: float) -> tuple[list[Element], float]:
    """The title below a horizontal axis, if there is one, and the height with it."""
    if not text:
        return [], height
    middle, y = (left + right) / 2, height + FONT
    return [label(text, right - left, x=middle, y=y, text_anchor="middle", class_="name")], height + 20


def apart(axis: Axis) -> list[Tick]:
    """The labelled ticks of a horizontal axis, thinned evenly until no two labels touch."""
    ticks = sorted((tick for tick in axis.ticks if tick.label), key=lambda tick: tick.at)
    while len(ticks) > 1 and any(
        axis.at(b.at) - axis.at(a.at) < (text_width(a.label) + text_width(b.label)) / 2 + 6 for a, b in pairwise(ticks)
    ):
        ticks = ticks[::2]
    return ticks


def rule(x1: float, y1: float, x2: float, y2: float, style: str) -> Element:
    """A thin straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=style)
