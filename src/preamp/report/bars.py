"""Bar charts to SVG: horizontal, so that names of any length have room, with each value beside its bar."""

from __future__ import annotations

from collections.abc import Sequence

from preamp.report.axis import Axis, fit
from preamp.report.charts import BarChart
from preamp.report.frame import COLOURS, NARROW, apart
from preamp.report.markup import FONT, Element, element, label, text_width
from preamp.report.values import format_number

BAR = 15.0
BETWEEN = 3.0
GROUP = 13.0


def draw_bars(chart: BarChart, width: float) -> tuple[list[Element], float]:
    """A bar chart's elements and its height."""
    narrow = width < NARROW
    values = [v for b in chart.series for part in (b.values, b.low, b.high) if part is not None for v in part]
    axis = fit(values, "log10" if chart.log else "linear", ticks=4 if narrow else 6, zero=True, pad=0.0)
    texts = [_text(value, chart.digits) for bars in chart.series for value in bars.values]
    names = max((text_width(name) for name in chart.labels), default=0.0)
    left = 6.0 if narrow else min(names, 0.34 * width) + 14
    right = width - min(max([24.0, *map(text_width, texts)]), 0.25 * width) - 12
    axis = axis.place(left, right)
    parts, top = _legend(chart, width)
    first = top
    bars: list[Element] = []
    for index, name in enumerate(chart.labels):
        if narrow:
            bars.append(label(name, width - 12, x=left, y=top + FONT, class_="halo"))
            top += FONT + 7
        else:
            tall = len(chart.series) * (BAR + BETWEEN) - BETWEEN
            middle = top + tall / 2 + 4
            bars.append(label(name, left - 12, x=left - 10, y=middle, text_anchor="end"))
        for number in range(len(chart.series)):
            bars += _bar(chart, number, index, axis, top, width)
            top += BAR + BETWEEN
        top += GROUP - BETWEEN
    bottom = top - GROUP / 2
    parts += _grid(axis, first, bottom)
    base = axis.at(axis.low) if chart.log else axis.project(0.0)
    assert base is not None
    parts.append(element("line", x1=base, y1=first - 2, x2=base, y2=bottom, class_="axis"))
    parts += bars
    height = bottom + 22
    if chart.value_label:
        middle = (left + right) / 2
        parts.append(
            label(
                chart.value_label,
                right - left,
                x=middle,
                y=height + FONT,
                text_anchor="middle",
                class_="name",
            )
        )
        height += 20
    return parts, height


def _text(value: float | None, digits: int | None) -> str:
    """What is written beside a bar."""
    return "-" if value is None else format_number(value, digits)


def _legend(chart: BarChart, width: float) -> tuple[list[Element], float]:
    """A block of colour and a name for each series, in as many rows as needed; nothing for a single one."""
    if len(chart.series) < 2:
        return [], 8.0
    pieces: list[Element] = []
    x, y = 4.0, 4.0
    for index, bars in enumerate(chart.series):
        used = 22 + min(text_width(" ".join(bars.name.split())), width - 40) + 16
        if x > 4 and x + used - 16 > width:
            x, y = 4.0, y + 19
        pieces.append(element("rect", x=x, y=y + 2, width=14, height=11, rx=2, class_=_style(index)))
        pieces.append(label(bars.name, width - 40, x=x + 20, y=y + 12))
        x += used
    return pieces, y + 30


def _style(index: int) -> str:
    """The classes of the bars of series `index`."""
    return f"bar s{index % COLOURS}"


def _grid(axis: Axis, top: float, bottom: float) -> list[Element]:
    """Vertical grid lines and the labels under them."""
    pieces = [
        element("line", x1=axis.at(t.at), y1=top - 2, x2=axis.at(t.at), y2=bottom, class_="grid")
        for t in axis.ticks
        if t.label
    ]
    for tick in apart(axis):
        at = max(axis.at(tick.at), text_width(tick.label) / 2)
        pieces.append(element("text", tick.label, x=at, y=bottom + 17, text_anchor="middle", class_="tick"))
    return pieces


def _bar(chart: BarChart, number: int, index: int, axis: Axis, top: float, width: float) -> list[Element]:
    """One bar with its whisker and its value."""
    bars = chart.series[number]
    value = bars.values[index]
    base = axis.at(axis.low) if chart.log else axis.project(0.0)
    end = axis.project(value)
    assert base is not None
    pieces: list[Element] = []
    reach = base
    if end is not None:
        hover = element("title", f"{chart.labels[index]}, {bars.name}: {_text(value, chart.digits)}")
        wide = max(abs(end - base), 0.5)
        pieces.append(
            element("rect", hover, x=min(base, end), y=top, width=wide, height=BAR, rx=2, class_=_style(number))
        )
        reach = max(reach, end)
    ends = [axis.project(part[index]) for part in (bars.low, bars.high) if part is not None]
    known = [place for place in ends if place is not None]
    if len(known) == 2:
        pieces += _whisker(min(known), max(known), top + BAR / 2)
        reach = max(reach, *known)
    text = _text(value, chart.digits)
    pieces.append(label(text, width - reach - 8, x=reach + 6, y=top + BAR / 2 + 4, class_="tick"))
    return pieces


def _whisker(start: float, end: float, y: float) -> Sequence[Element]:
    """A line from `start` to `end` with short end strokes."""
    return [
        element("line", x1=start, y1=y, x2=end, y2=y, class_="whisker"),
        element("line", x1=start, y1=y - 3, x2=start, y2=y + 3, class_="whisker"),
        element("line", x1=end, y1=y - 3, x2=end, y2=y + 3, class_="whisker"),
    ]
