"""A report to one HTML page: charts inline, data embedded, nothing loaded and no script run."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.resources import files
from typing import Any

from .charts import BarChart, ExponentHistogram, HeatMap, LineChart
from .finding import Finding, count_severities
from .markup import clean
from .svg import NARROW_WIDTH, WIDE_WIDTH, chart_css, to_svg
from .table import Table
from .values import paragraphs, to_json

CONTENTS_FROM = 4
"""A table of contents appears from this many sections on."""


BRIEF = 16
"""Cells up to this many characters stay on one line."""


def render(report: Any) -> str:
    """The page of a `Report`. Every text in it is escaped by jinja2, or by `markup` inside the charts."""
    from markupsafe import Markup

    counts = [(severity, count) for severity, count in count_severities(report.findings).items() if count]
    page = _template().render(
        report=report,
        css=Markup(chart_css() + _read("style.css")),
        counts=counts,
        environment=report.environment_rows(),
        summary=[inline(text) for text in paragraphs(report.summary)],
        sections=[
            {
                "title": section.title,
                "anchor": section.anchor,
                "text": [inline(text) for text in paragraphs(section.text)],
                "items": [_view(item, report) for item in section.items],
            }
            for section in report.sections
        ],
        contents=len(report.sections) >= CONTENTS_FROM,
        data=Markup(embedded_json(report.data)),
    )
    return clean(page)


def embedded_json(value: Any) -> str:
    """`value` as JSON that may stand inside a script element: no <, > or & is left in it."""
    text = json.dumps(to_json(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def inline(text: str) -> list[tuple[bool, str]]:
    """A paragraph as (is code, text) pieces, cut at pairs of backticks."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:  # a lone backtick is only a character
        pieces[-2:] = ["`".join(pieces[-2:])]
    return [(index % 2 == 1, piece) for index, piece in enumerate(pieces) if piece]


def _view(item: Any, report: Any) -> dict[str, Any]:
    """What the template needs of one item."""
    from markupsafe import Markup

    if isinstance(item, Finding):
        meaning = [inline(text) for text in paragraphs(report.glossary.get(item.code, ""))]
        return {"kind": "finding", "item": item, "message": inline(item.message), "meaning": meaning}
    if isinstance(item, Table):
        return {"kind": "table", "item": item, "columns": item.layout, "rows": _rows(item)}
    if isinstance(item, (LineChart, ExponentHistogram, BarChart, HeatMap)):
        drawings = [to_svg(item, width, standalone=False) for width in (WIDE_WIDTH, NARROW_WIDTH)]
        return {"kind": "chart", "item": item, "drawings": [Markup(drawing) for drawing in drawings]}
    return {"kind": "snippet", "item": item}


def _rows(table: Table) -> list[list[tuple[str, str]]]:
    """The cells of a table as (text, classes) pairs; negative numbers have a true minus sign."""
    rows = []
    for texts, values in zip(table.cells, table.rows, strict=True):
        cells = []
        for text, value, column in zip(texts, values, table.layout, strict=True):
            negative = isinstance(value, (int, float)) and value < 0
            style = f"{column.align} brief" if len(text) <= BRIEF else column.align
            cells.append((text.replace("-", "\u2212", 1) if negative else text, style))
        rows.append(cells)
    return rows


@lru_cache(maxsize=1)
def _template() -> Any:
    """The page's template, compiled once."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_read("template.html.j2"))


def _read(name: str) -> str:
    """A file that lies beside this module, in the package."""
    return files("preamp.report").joinpath(name).read_text(encoding="utf-8")
