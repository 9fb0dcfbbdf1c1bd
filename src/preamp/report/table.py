"""A table of plain values: to aligned text, Markdown and JSON."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from .values import Cell, format_cell, to_json

Align = Literal["auto", "left", "right"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column's name, unit, and how its numbers are written.

    `digits` is the count after the decimal point (None: four significant digits). `align="auto"` puts a
    column of numbers to the right and anything else to the left.
    """

    name: str
    unit: str = ""
    digits: int | None = None
    align: Align = "auto"

    def __post_init__(self) -> None:
        """Refuse an unknown alignment."""
        if self.align not in ("auto", "left", "right"):
            raise ValueError(f"align of column {self.name!r} must be auto, left or right; got {self.align!r}")

    @property
    def heading(self) -> str:
        """The name with its unit in brackets."""
        name = " ".join(self.name.split())
        return f"{name} ({self.unit})" if self.unit else name


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text, numbers, booleans and None under named columns.

    `columns` may be given as plain names. Raises `ValueError` for a row of another length than `columns`.

    >>> print(Table("", ("level", "ms"), [("O0", 2.5), ("O5", None)]).to_text())
    level   ms
    -----  ---
    O0     2.5
    O5       -
    """

    title: str
    columns: Sequence[Column | str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Freeze the rows and check their lengths."""
        columns = tuple(Column(c) if isinstance(c, str) else c for c in self.columns)
        rows = tuple(tuple(row) for row in self.rows)
        for index, row in enumerate(rows):
            if len(row) != len(columns):
                raise ValueError(
                    f"row {index} of table {self.title!r} has {len(row)} cells for {len(columns)} columns: "
                    f"{row!r} under {[column.name for column in columns]}"
                )
        notes = (self.notes,) if isinstance(self.notes, str) else tuple(self.notes)
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "notes", notes)

    @property
    def layout(self) -> tuple[Column, ...]:
        """The columns with "auto" settled into "left" or "right"."""
        settled = []
        for index, column in enumerate(self.columns):
            assert isinstance(column, Column)
            known = [row[index] for row in self.rows if row[index] is not None]
            numeric = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in known)
            align: Align = "right" if known and numeric else "left"
            settled.append(column if column.align != "auto" else replace(column, align=align))
        return tuple(settled)

    @property
    def cells(self) -> tuple[tuple[str, ...], ...]:
        """Every cell as text, row by row."""
        layout = self.layout
        return tuple(
            tuple(format_cell(value, column.digits) for value, column in zip(row, layout, strict=True))
            for row in self.rows
        )

    def to_text(self) -> str:
        """Aligned columns for a terminal; the title above, the notes below."""
        layout, cells = self.layout, self.cells
        grid = [tuple(column.heading for column in layout), *cells]
        widths = [max(_width(row[index]) for row in grid) for index in range(len(layout))]
        grid.insert(1, tuple("-" * width for width in widths))
        lines = [self.title] if self.title else []
        for row in grid:
            padded = [_pad(text, width, column.align) for text, width, column in zip(row, widths, layout, strict=True)]
            lines.append("  ".join(padded).rstrip())
        lines.extend(self.notes)
        return "\n".join(lines)

    def to_markdown(self) -> str:
        """A pipe table as GitHub reads it; what is markup in a cell is escaped."""
        layout = self.layout
        lines = [f"**{_escape(self.title)}**", ""] if self.title else []
        lines.append(_pipes([_escape(column.heading) for column in layout]))
        lines.append(_pipes(["---:" if column.align == "right" else ":---" for column in layout]))
        lines.extend(_pipes([_escape(text) for text in row]) for row in self.cells)
        if self.notes:
            lines += ["", *(_escape(note) for note in self.notes)]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Title, columns, raw rows and notes, in types that strict JSON takes (nan and inf are null)."""
        parts = {"columns": [asdict(column) for column in self.layout], "rows": to_json(self.rows)}
        return {"kind": "table", "title": self.title, **parts, "notes": list(self.notes)}


def _width(text: str) -> int:
    """How many cells of a terminal `text` takes: two for wide characters, none for accents that combine."""
    if text.isascii():
        return len(text)
    bare = (each for each in text if unicodedata.category(each) not in ("Mn", "Me", "Cf"))
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in bare)


def _pad(text: str, width: int, align: Align) -> str:
    """`text` filled with spaces to `width` terminal cells."""
    fill = " " * (width - _width(text))
    return fill + text if align == "right" else text + fill


def _pipes(cells: Sequence[str]) -> str:
    """One line of a pipe table."""
    return "| " + " | ".join(cells) + " |"


def _escape(text: str) -> str:
    """`text` as Markdown shows it literally, on one line."""
    line = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace("\\", "\\\\")
    for mark in "|`*_[]":
        line = line.replace(mark, "\\" + mark)
    return line
