"""What surrounds the data of a chart: axis titles, legend, span labels, grid, ticks; nothing touches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .axis import Axis, Tick
from .charts import Span
from .markup import FONT, Element, element, label, text_width

COLOURS = 8
DASHES = 6
NARROW = 500.0
"""Below this width a drawing has the layout for a phone."""

LANE = 18.0
SMALL = 11.0


Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a legend: the name and how its series is drawn."""

    name: str
    style: str


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
    taken: tuple[Box, ...] = ()


@dataclass(frozen=True, slots=True)
class _Lane:
    """An x span with the place of its bar and of its label."""

    start: float
    end: float
    top: float
    middle: float
    room: float
    text: str


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
    entries: Sequence[Entry] = (),
    spans: Sequence[Span] = (),
) -> Frame:
    """Lay out a chart of this width: y title, legend, span labels, plot, ticks, x title, from the top."""
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
    pieces, top = _legend(entries, 4.0, width - 4, top)
    behind += pieces
    lanes, plot_top = _lanes(spans, x, top)
    plot_top += 4 if lanes else 8
    bottom = plot_top + (200 if narrow else 230)
    y = y.place(bottom, plot_top)
    behind += _shades(lanes, bottom)
    pieces, taken = _y_spans(spans, y, left, right)
    behind += pieces
    behind += _grid(x, y, left, plot_top, right, bottom)
    height = bottom + 22
    if x_label:
        behind.append(
            label(
                x_label,
                right - left,
                x=(left + right) / 2,
                y=height + FONT,
                text_anchor="middle",
                class_="name",
            )
        )
        height += 20
    return Frame(width, height, left, plot_top, right, bottom, x, y, tuple(behind), tuple(taken))


def _legend(entries: Sequence[Entry], left: float, right: float, top: float) -> tuple[list[Element], float]:
    """The legend in as many rows as it needs, and where it ends."""
    named = [entry for entry in entries if entry.name]
    if not named:
        return [], top
    pieces: list[Element] = []
    x, y = left, top
    for entry in named:
        room = right - left - 40
        used = 30 + min(text_width(" ".join(entry.name.split())), room) + 16
        if x > left and x + used - 16 > right:
            x, y = left, y + 19
        line = f"M{x:.1f} {y + 8:.1f}L{x + 24:.1f} {y + 8:.1f}"
        pieces.append(element("path", d=line, class_=f"line {entry.style}"))
        pieces.append(label(entry.name, room, x=x + 30, y=y + 12))
        x += used
    return pieces, y + 22


def _lanes(spans: Sequence[Span], x: Axis, top: float) -> tuple[list[_Lane], float]:
    """The x spans that can be seen, each on the first lane with room for it, and where the lanes end."""
    taken: list[list[tuple[float, float]]] = []
    placed: list[_Lane] = []
    for span in spans:
        ends = _ends(span, x) if span.axis == "x" else None
        if ends is None:
            continue
        start, end = ends
        half = min(text_width(span.label, SMALL), x.end - x.start - 12) / 2 + 5
        middle = min(max((start + end) / 2, x.start + half), x.end - half)
        reach = (min(start, middle - half), max(end, middle + half))
        free = (
            index
            for index, lane in enumerate(taken)
            if all(reach[1] <= a + 0.5 or b - 0.5 <= reach[0] for a, b in lane)
        )
        index = next(free, len(taken))
        if index == len(taken):
            taken.append([])
        taken[index].append(reach)
        placed.append(_Lane(start, end, top + index * LANE, middle, 2 * half - 8, span.label))
    return placed, top + len(taken) * LANE


def _shades(lanes: Sequence[_Lane], bottom: float) -> list[Element]:
    """Each x span as a shaded range, under a bar with its label."""
    pieces: list[Element] = []
    for lane in lanes:
        base, wide = lane.top + LANE - 4, lane.end - lane.start
        pieces.append(element("rect", x=lane.start, y=base, width=wide, height=bottom - base, class_="span"))
    for lane in lanes:
        base, wide = lane.top + LANE - 4, max(lane.end - lane.start - 1, 1.0)
        pieces.append(element("rect", x=lane.start + 0.5, y=base, width=wide, height=2, class_="lane"))
        pieces.append(
            label(
                lane.text,
                lane.room,
                x=lane.middle,
                y=base - 4,
                size=SMALL,
                class_="small",
                text_anchor="middle",
            )
        )
    return pieces


def _y_spans(spans: Sequence[Span], y: Axis, left: float, right: float) -> tuple[list[Element], list[Box]]:
    """Each y span as a shaded range with its label inside, at the right; and the boxes of the labels."""
    pieces: list[Element] = []
    taken: list[Box] = []
    for span in spans:
        ends = _ends(span, y) if span.axis == "y" else None
        if ends is None:
            continue
        low, high = max(ends), min(ends)
        pieces.append(element("rect", x=left, y=high, width=right - left, height=low - high, class_="span"))
        room = right - left - 12
        text_y = min(max(high + SMALL + 2, y.end + SMALL), y.start - 3)
        pieces.append(
            label(
                span.label,
                room,
                x=right - 6,
                y=text_y,
                size=SMALL,
                class_="small halo",
                text_anchor="end",
            )
        )
        wide = min(text_width(span.label, SMALL), room)
        taken.append((right - 6 - wide, text_y - SMALL, right - 6, text_y + 3))
    return pieces, taken


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
        pieces.append(_rule(left, at, right, at, "grid" if tick.label else "grid minor"))
        if tick.label:
            pieces.append(label(tick.label, left - 8, x=left - 8, y=at + 4, text_anchor="end", class_="tick"))
    for tick in x.ticks:
        at = x.at(tick.at)
        pieces.append(_rule(at, top, at, bottom, "grid" if tick.label else "grid minor"))
    for tick in apart(x):
        at = x.at(tick.at)
        half = text_width(tick.label) / 2
        centre = min(max(at, half), right + 24 - half)
        pieces.append(element("text", tick.label, x=centre, y=bottom + 17, text_anchor="middle", class_="tick"))
    pieces.append(_rule(left, bottom, right, bottom, "axis"))
    return pieces


def apart(axis: Axis) -> list[Tick]:
    """The labelled ticks of a horizontal axis, thinned evenly until no two labels touch."""
    ticks = sorted((tick for tick in axis.ticks if tick.label), key=lambda tick: tick.at)
    while len(ticks) > 1 and any(
        axis.at(b.at) - axis.at(a.at) < (text_width(a.label) + text_width(b.label)) / 2 + 6 for a, b in pairwise(ticks)
    ):
        ticks = ticks[::2]
    return ticks


def _rule(x1: float, y1: float, x2: float, y2: float, style: str) -> Element:
    """A thin straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=style)
