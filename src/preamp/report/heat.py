"""Heat maps to SVG: one line a row with its name, the value written in every cell, so that no colour is needed."""

from __future__ import annotations

from preamp.report.charts import HeatMap
from preamp.report.frame import NARROW
from preamp.report.markup import FONT, Element, element, label, text_width

ROW = 21.0
GAP = 2.0
DARKEST = 0.55
"""Opacity at the dark end: text on it can still be read, on light and on dark paper."""
SMALL = 11.0


def draw_heat(chart: HeatMap, width: float) -> tuple[list[Element], float]:
    """A heat map's elements and its height."""
    names = max((text_width(name) for name in chart.rows), default=0.0)
    left = min(names, (0.36 if width < NARROW else 0.44) * width) + 14
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
    if chart.value_label:
        parts.append(label(chart.value_label, width - 8, x=left, y=top + FONT + 6, class_="name"))
        top += FONT + 12
    return parts, top + 2


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
