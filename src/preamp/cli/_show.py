"""Tables in the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from ..report import Column, Table
from ..report.values import format_cell


def show(table: Table, console: Console) -> None:
    """Print a table as rich sees it; in a pipe, as plain text of whatever width it needs."""
    if not console.is_terminal:
        console.print(table.to_text(), markup=False, highlight=False, soft_wrap=True)
        return
    drawn = RichTable(title=table.title, box=SIMPLE_HEAD, title_justify="left", title_style="bold")
    columns = [column if isinstance(column, Column) else Column(column) for column in table.columns]
    for index, column in enumerate(columns):
        numbers = all(isinstance(row[index], (int, float, type(None))) for row in table.rows)
        drawn.add_column(Text(column.heading), justify="right" if numbers else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*[Text(format_cell(cell, column.digits)) for cell, column in zip(row, columns, strict=True)])
    console.print(drawn)
    for note in table.notes:
        console.print(Text(note, style="dim"))
