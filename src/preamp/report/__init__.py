"""Findings, tables, charts and reports: values that turn into text, Markdown, JSON and one HTML file."""

from __future__ import annotations

from .charts import BarChart, Bars, Chart, ExponentHistogram, HeatMap, LineChart, Marker, Series, Span, exponent_spans
from .document import Item, Picture, Report, Section, Status
from .finding import SEVERITIES, Direction, Finding, Severity, count_severities
from .table import Column, Table
from .values import Cell, format_number, smoothed, to_json

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
    "Picture",
    "Report",
    "Section",
    "Series",
    "Severity",
    "Span",
    "Status",
    "Table",
    "count_severities",
    "exponent_spans",
    "format_number",
    "smoothed",
    "to_json",
]
