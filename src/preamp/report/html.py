"""A report to one HTML page: charts inline, data embedded, nothing loaded and no script run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

from .charts import Chart, LineChart
from .finding import Finding, count_severities
from .markup import clean
from .numbers import numbers
from .overlap import difference_chart, overlap_note
from .svg import NARROW_WIDTH, WIDE_WIDTH, chart_css, to_svg
from .table import Table
from .values import paragraphs, to_json

CONTENTS_FROM = 4
"""A table of contents appears from this many sections on."""


BRIEF = 16
"""Cells up to this many characters stay on one line."""

FIRST_WIDTH = 490.0
"""Width of a drawing beside what to do, on a wide screen."""

BESIDE_WIDTH = 430.0
"""Width of one of two drawings in a row, on a wide screen."""

FINDINGS = 40
"""So many findings of a section are told in full; the others have a row each."""

LISTED = 100
"""Rows of a table that are shown at most."""

EMBEDDED = 250_000
"""Characters of JSON that are embedded at most."""


def render(report: Any) -> str:
    """The page of a `Report`. Every text in it is escaped by jinja2, or by `markup` inside the charts."""
    from markupsafe import Markup

    counts = [(severity, count) for severity, count in count_severities(report.findings).items() if count]
    data = embedded_json(report.data) if report.data else ""
    page = _template().render(
        report=report,
        css=Markup(chart_css() + _read("style.css")),
        counts=counts,
        environment=report.environment_rows(),
        summary=[inline(text) for text in paragraphs(report.summary)],
        picture=None if report.picture is None else _view(report.picture, report, FIRST_WIDTH),
        advice=[inline(text) for text in paragraphs(report.advice)],
        sections=[
            {
                "title": section.title,
                "anchor": section.anchor,
                "text": [inline(text) for text in paragraphs(section.text)],
                "items": [_view(item, report) for item in _told(section.items)],
            }
            for section in report.sections
        ],
        contents=len(report.sections) >= CONTENTS_FROM,
        data=Markup(data if len(data) <= EMBEDDED else ""),
    )
    return clean(page)


def _told(items: Sequence[Any]) -> list[Any]:
    """The items of a section, of very many findings only the most harmful in full."""
    found = sorted(item for item in items if isinstance(item, Finding))
    if len(found) <= FINDINGS:
        return list(items)
    rest = [(f.severity, f.code, f.module, f.step, f.message) for f in found[FINDINGS:]]
    table = Table(f"{len(rest)} more findings", ("severity", "code", "module", "step", "what"), rest)
    return [*found[:FINDINGS], table, *(item for item in items if not isinstance(item, Finding))]


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


def _view(item: Any, report: Any, width: float = WIDE_WIDTH) -> dict[str, Any]:
    """What the template needs of one item; `width` is that of a drawing on a wide screen."""
    if isinstance(item, Finding):
        meaning = [inline(text) for text in paragraphs(report.glossary.get(item.code, ""))]
        return {"kind": "finding", "item": item, "message": inline(item.message), "meaning": meaning}
    if isinstance(item, Table):
        return _table(item)
    beside, close = (difference_chart(item), overlap_note(item)) if isinstance(item, LineChart) else (None, "")
    if beside is None:
        return {"kind": "charts", "charts": [_chart(item, width, close, item.note)]}
    return {"kind": "charts", "charts": [_chart(item, BESIDE_WIDTH, item.note), _chart(beside, BESIDE_WIDTH, close)]}


def _chart(chart: Chart, width: float, *notes: str) -> dict[str, Any]:
    """A chart drawn for wide and for narrow screens, what to say below it, and its numbers."""
    from markupsafe import Markup

    screens = {"wide": width, "narrow": NARROW_WIDTH}
    drawings = [Markup(to_svg(chart, each, screen=name)) for name, each in screens.items()]
    told = [note for note in notes if note]
    return {"title": chart.title, "drawings": drawings, "notes": told, "numbers": _table(numbers(chart))}


def _table(table: Table) -> dict[str, Any]:
    """A table for the template; of very many rows the first ones."""
    left = len(table.rows) - LISTED
    shown = replace(table, rows=table.rows[:LISTED]) if left > 0 else table
    notes = [*table.notes, *([f"{left} more rows are in the JSON file."] if left > 0 else [])]
    return {"kind": "table", "title": table.title, "columns": shown.layout, "rows": _rows(shown), "notes": notes}


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
