"""Findings, tables, charts and reports: values that turn into text, Markdown, JSON and one HTML file."""

from __future__ import annotations

from preamp.report.charts import (
    BarChart,
    Bars,
    Chart,
    ExponentHistogram,
    HeatMap,
    LineChart,
    Marker,
    Series,
    Span,
    exponent_spans,
)
from preamp.report.document import Item, Report, Section, Snippet, Status
from preamp.report.finding import SEVERITIES, Direction, Finding, Severity, count_severities
from preamp.report.png import write_png
from preamp.report.svg import to_svg
from preamp.report.table import Column, Table
from preamp.report.values import Cell, format_number, smoothed, to_json

__all__ = [
    "SEVERITIES",
    "BarChart",
    "Bars",
    "Cell",
    "Chart",
    "Column",
    "Direction",
    "ExponentHistogram",
    "Finding",
    "HeatMap",
    "Item",
    "LineChart",
    "Marker",
    "Report",
    "Section",
    "Series",
    "Severity",
    "Snippet",
    "Span",
    "Status",
    "Table",
    "count_severities",
    "exponent_spans",
    "format_number",
    "smoothed",
    "to_json",
    "to_svg",
    "write_png",
]
