"""Charts with a line for each name to SVG: horizontal bars, so that names of any length have room, and heat maps.

Every value is written beside its bar or in its cell, so that no colour is needed.
"""

from __future__ import annotations

from functools import partial

from .axis import Axis, fit
from .charts import BarChart, HeatMap
from .frame import COLOURS, NARROW, axis_title, legend, rule, tick_labels
from .markup import FONT, Element, element, label, text_width
from .values import format_number

BETWEEN = 3.0
GROUP = 13.0

ROW = 21.0
GAP = 2.0
DARKEST = 0.55
"""Opacity at the dark end: text on it can still be read, on light and on dark paper."""
SMALL = 11.0


def draw_bars(chart: BarChart, width: float) -> tuple[list[Element], float]:
    """A bar chart's elements and its height."""
    narrow = width < NARROW
    values = [v for b in chart.series for part in (b.values, b.low, b.high) if part is not None for v in part]
    axis = fit([*values, chart.base], ticks=4 if narrow else 6, zero=not chart.base, pad=0.0)
    texts = [_text(value, chart.digits) for bars in chart.series for value in bars.values]
    names = max((text_width(name) for name in chart.labels), default=0.0)
    above = narrow or names > 0.34 * width  # names are whole
    left = 6.0 if above else names + 14
    right = width - min(max([24.0, *map(text_width, texts)]), 0.25 * width) - 12
    axis = axis.place(left, right)
    parts: list[Element] = []
    top = 8.0
    if len(chart.series) > 1:  # of a single one the value label says enough
        entries = [(bars.name, partial(_block, _style(index))) for index, bars in enumerate(chart.series)]
        parts, top = legend(entries, 14, width, 4)
        top += 8
    first = top
    bars: list[Element] = []
    for index, name in enumerate(chart.labels):
        if above:
            bars.append(label(name, width - 12, x=left, y=top + FONT, class_="halo"))
            top += FONT + 6
        else:
            middle = top + (len(chart.series) * (_tall(width) + BETWEEN) - BETWEEN) / 2 + 4
            bars.append(label(name, left - 12, x=left - 10, y=middle, text_anchor="end"))
        for number in range(len(chart.series)):
            bars += _bar(chart, number, index, axis, top, width)
            top += _tall(width) + BETWEEN
        top += GROUP - BETWEEN
    bottom = top - GROUP / 2
    parts += [rule(axis.at(t.at), first - 2, axis.at(t.at), bottom, "grid") for t in axis.ticks if t.label]
    parts += tick_labels(axis, bottom, width)
    base = _base(chart, axis)
    parts += [rule(base, first - 2, base, bottom, "axis"), *bars]
    title, height = axis_title(chart.value_label, left, right, bottom + 22)
    return parts + title, height


def _tall(width: float) -> float:
    """Height of a bar: on a phone, what to do is to stay in sight below."""
    return 12.0 if width < NARROW else 15.0


def _base(chart: BarChart, axis: Axis) -> float:
    """Where bars begin."""
    base = axis.project(chart.base)
    assert base is not None
    return base


def _text(value: float | None, digits: int | None) -> str:
    """What is written beside a bar."""
    return "-" if value is None else format_number(value, digits)


def _block(style: str, x: float, y: float) -> Element:
    return element("rect", x=x, y=y + 2, width=14, height=11, rx=2, class_=style)


def _style(index: int) -> str:
    """The classes of the bars of series `index`."""
    return f"bar s{index % COLOURS}"


def _bar(chart: BarChart, number: int, index: int, axis: Axis, top: float, width: float) -> list[Element]:
    """One bar with its whisker and its value."""
    bars = chart.series[number]
    value = bars.values[index]
    base, end, tall = _base(chart, axis), axis.project(value), _tall(width)
    pieces: list[Element] = []
    reach = base
    if end is not None:
        hover = element("title", f"{chart.labels[index]}, {bars.name}: {_text(value, chart.digits)}")
        wide = max(abs(end - base), 0.5)
        pieces.append(
            element("rect", hover, x=min(base, end), y=top, width=wide, height=tall, rx=2, class_=_style(number))
        )
        reach = max(reach, end)
    ends = [axis.project(part[index]) for part in (bars.low, bars.high) if part is not None]
    known = [place for place in ends if place is not None]
    if len(known) == 2:
        pieces += _whisker(min(known), max(known), top + tall / 2)
        reach = max(reach, *known)
    text = _text(value, chart.digits)
    pieces.append(label(text, width - reach - 8, x=reach + 6, y=top + tall / 2 + 4, class_="tick"))
    return pieces


def _whisker(start: float, end: float, y: float) -> list[Element]:
    """A line from `start` to `end` with short end strokes."""
    strokes = [rule(x, y - 3, x, y + 3, "whisker") for x in (start, end)]
    return [rule(start, y, end, y, "whisker"), *strokes]


def draw_heat(chart: HeatMap, width: float) -> tuple[list[Element], float]:
    """A heat map's elements and its height."""
    names = max((text_width(name) for name in chart.rows), default=0.0)
    left = min(names, (0.3 if width < NARROW else 0.44) * width) + 14
    wide = (width - left - 2) / max(len(chart.columns), 1)
    parts: list[Element] = []
    lines = [_wrapped(name, wide - 6) for name in chart.columns]
    top = max(map(len, lines), default=0) * (SMALL + 2) + 8
    for column, words in enumerate(lines):
        for index, line in enumerate(reversed(words)):
            x, y = left + (column + 0.5) * wide, top - 7 - index * (SMALL + 2)
            parts.append(label(line, wide - 4, x=x, y=y, size=SMALL, text_anchor="middle", class_="small"))
    for name, row in zip(chart.rows, chart.values, strict=True):
        parts.append(label(name, left - 12, x=left - 10, y=top + ROW / 2 + 4, text_anchor="end"))
        for column, value in enumerate(row):
            parts += _cell(chart, name, column, value, (left + column * wide, top, wide))
        top += ROW
    for line in _wrapped(chart.value_label, width - 16):
        top += SMALL + 4
        parts.append(label(line, width - 8, x=4, y=top, size=SMALL, class_="small"))
    return parts, top + 6


def _cell(
    chart: HeatMap, name: str, column: int, value: float | None, place: tuple[float, float, float]
) -> list[Element]:
    """The coloured rectangle of one value, and the value."""
    x, y, wide = place
    text = chart.cell(value)
    pieces: list[Element] = []
    if value is not None:
        hover = element("title", f"{name}, {chart.columns[column]}: {text}")
        opacity = f"{0.05 + chart.shade(value) * (DARKEST - 0.05):.2f}"
        pieces.append(
            element(
                "rect", hover, x=x + GAP / 2, y=y + GAP / 2, width=max(wide - GAP, 1), height=ROW - GAP, rx=2,
                class_="heat", fill_opacity=opacity,
            )
        )  # fmt: skip
    middle = x + wide / 2
    pieces.append(label(text, wide, x=middle, y=y + ROW / 2 + 4, size=SMALL, text_anchor="middle", class_="cell"))
    return pieces


def _wrapped(text: str, width: float) -> list[str]:
    """Words in as many lines as needed."""
    lines: list[str] = []
    for word in text.split():
        if lines and text_width(f"{lines[-1]} {word}", SMALL) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
