"""Charts as values: what is drawn, not how. `svg.py` draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from .values import Fields, as_float, format_number

Points = Sequence[float | None]

MARKERS_LISTED = 12
"""So many markers are listed in the text form of a chart."""


@dataclass(frozen=True, slots=True)
class Series(Fields):
    """One line of a chart. None, nan and inf leave a gap; `low` and `high` draw a band around the line.

    `dashed` marks a reference or a fit; `steps` holds each value until the next (a loss scale). Raises
    `ValueError` when lengths differ, or when only one of `low` and `high` is given.
    """

    name: str
    x: Points
    y: Points
    low: Points | None = None
    high: Points | None = None
    dashed: bool = False
    steps: bool = False

    def __post_init__(self) -> None:
        """Freeze the points as finite floats or None."""
        if (self.low is None) != (self.high is None):
            raise ValueError(f"series {self.name!r}: a band needs both low and high")
        self._freeze_points("x", "y", "low", "high")
        lengths = {len(v) for v in (self.x, self.y, self.low, self.high) if v is not None}
        if len(lengths) > 1:
            raise ValueError(
                f"series {self.name!r}: x has {len(self.x)} points, y has {len(self.y)}, and low and high "
                f"(if given) must be as long"
            )

    def to_text(self, digits: int | None = None) -> str:
        """The series in a few numbers: first, last, smallest and largest value."""
        values = [value for value in self.y if value is not None]
        if not values:
            return f"{self.name}: no finite point"
        first, last, low, high = (format_number(v, digits) for v in (values[0], values[-1], min(values), max(values)))
        gaps = len(self.y) - len(values)
        return (
            f"{self.name}: {first} to {last}, smallest {low}, largest {high}, {len(values)} "
            f"point{'s' if len(values) != 1 else ''}" + (f" and {gaps} not finite" if gaps else "")
        )


@dataclass(frozen=True, slots=True)
class Marker(Fields):
    """A labelled point; with `y=None` a vertical rule at `x`. Left out where an axis has no place for it."""

    x: float
    y: float | None
    label: str


@dataclass(frozen=True, slots=True)
class Span(Fields):
    """A shaded range of x, as in "fp16 subnormal". An infinite or None end reaches the plot's edge.

    Spans do not widen the axis: one wholly outside what the data needs is left out.
    """

    start: float | None
    end: float | None
    label: str


def exponent_spans(
    name: str, *, smallest_subnormal: float, smallest_normal: float, largest: float
) -> tuple[Span, Span]:
    """The subnormal and the normal range of a number format, for the x axis of an `ExponentHistogram`.

    >>> exponent_spans("fp16", smallest_subnormal=2**-24, smallest_normal=2**-14, largest=65504)[1]
    Span(start=-14, end=16, label='fp16 normal')
    """
    tiny, normal, top = (math.frexp(value)[1] - 1 for value in (smallest_subnormal, smallest_normal, largest))
    return Span(tiny, normal, f"{name} subnormal"), Span(normal, top + 1, f"{name} normal")


@dataclass(frozen=True, slots=True)
class LineChart(Fields):
    """Lines over a common x axis, with bands, markers and shaded ranges.

    Axes are linear unless `x_log` (powers of ten) or `y_log2` (powers of two); on a log axis a point that is not
    positive leaves a gap. `against` names the series that the others are held against: a report draws the difference
    beside them.
    """

    kind: ClassVar[str] = "line_chart"

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    _: KW_ONLY
    x_log: bool = False
    y_log2: bool = False
    markers: Sequence[Marker] = ()
    spans: Sequence[Span] = ()
    note: str = ""
    against: str = ""

    def __post_init__(self) -> None:
        """Freeze the parts."""
        self._freeze("series", "markers", "spans")

    def to_text(self) -> str:
        """Title and one line a series."""
        head = f"{self.title} ({self.y_label} over {self.x_label})"
        marks = [f"  {m.label}: at {format_number(m.x)}" for m in self.markers[:MARKERS_LISTED]]
        if len(self.markers) > MARKERS_LISTED:
            marks.append(f"  and {len(self.markers) - MARKERS_LISTED} more markers")
        return "\n".join([head, *(f"  {series.to_text()}" for series in self.series), *marks])


@dataclass(frozen=True, slots=True)
class ExponentHistogram(Fields):
    """How often each power of two occurs: `x` is the exponent e of a bin [2^e, 2^(e+1)), `y` its share.

    Drawn as filled steps over an axis of powers of two; `exponent_spans` gives the ranges of a number format.
    """

    kind: ClassVar[str] = "exponent_histogram"

    title: str
    series: Sequence[Series]
    _: KW_ONLY
    x_label: str = "magnitude"
    y_label: str = "share of values"
    spans: Sequence[Span] = ()
    note: str = ""

    def __post_init__(self) -> None:
        """Freeze the parts."""
        self._freeze("series", "spans")

    def to_text(self) -> str:
        """Title and, for each series, the exponents it covers and where it peaks."""
        lines = [f"{self.title} ({self.y_label} over {self.x_label})"]
        for series in self.series:
            bins = [
                (y, x) for x, y in zip(series.x, series.y, strict=True) if y is not None and x is not None and y > 0
            ]
            if not bins:
                lines.append(f"  {series.name}: empty")
                continue
            exponents = [x for _, x in bins]
            peak = max(bins)[1]
            lines.append(f"  {series.name}: 2^{min(exponents):g} to 2^{max(exponents):g}, peak at 2^{peak:g}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Bars(Fields):
    """One colour of a bar chart: a value for every label; `low` and `high` draw a whisker."""

    name: str
    values: Points
    low: Points | None = None
    high: Points | None = None

    def __post_init__(self) -> None:
        """Freeze the values as finite floats or None."""
        if (self.low is None) != (self.high is None):
            raise ValueError(f"bars {self.name!r}: whiskers need both low and high")
        self._freeze_points("values", "low", "high")


@dataclass(frozen=True, slots=True)
class BarChart(Fields):
    """Groups of horizontal bars: one group a label, one bar for each of `series` from `base` on, the value beside it.

    Raises `ValueError` when a series has not one value for every label.
    """

    kind: ClassVar[str] = "bar_chart"

    title: str
    labels: Sequence[str]
    series: Sequence[Bars]
    value_label: str
    _: KW_ONLY
    base: float = 0.0
    digits: int | None = None
    note: str = ""

    def __post_init__(self) -> None:
        """Freeze the parts and check their lengths."""
        self._freeze("labels", "series")
        for bars in self.series:
            for values in (bars.values, bars.low, bars.high):
                if values is not None and len(values) != len(self.labels):
                    raise ValueError(
                        f"bars {bars.name!r} of chart {self.title!r} have {len(values)} values for "
                        f"{len(self.labels)} labels"
                    )

    def to_text(self) -> str:
        """Title and one line a label."""
        lines = [f"{self.title} ({self.value_label})"]
        for index, label in enumerate(self.labels):
            values = [
                f"{bars.name} {'-' if v is None else format_number(v, self.digits)}".strip()
                for bars in self.series
                for v in (bars.values[index],)
            ]
            lines.append(f"  {label}: {', '.join(values)}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class HeatMap(Fields):
    """A value for every row and column, the harmful ones dark: "which layer, and in what".

    `values`: one sequence a row, None where there is none; `pale` and `dark` are the values at the two ends of the
    shades, the smaller one first or last. Raises `ValueError` when a row has not one value for every column, or when
    the ends are equal or not finite.
    """

    kind: ClassVar[str] = "heat_map"

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Points]
    value_label: str
    _: KW_ONLY
    pale: float = 0.0
    dark: float = 1.0
    percent: bool = False
    digits: int | None = None
    note: str = ""

    def __post_init__(self) -> None:
        """Freeze the parts and check their lengths."""
        self._freeze("rows", "columns")
        object.__setattr__(self, "values", tuple(tuple(as_float(v) for v in row) for row in self.values))
        lengths = {len(row) for row in self.values}
        if len(self.values) != len(self.rows) or lengths - {len(self.columns)}:
            raise ValueError(
                f"heat map {self.title!r} has {len(self.rows)} rows and {len(self.columns)} columns; its values are "
                f"{len(self.values)} rows of {sorted(lengths)}"
            )
        if not (math.isfinite(self.pale) and math.isfinite(self.dark)) or self.pale == self.dark:
            raise ValueError(f"heat map {self.title!r}: pale and dark are two different finite values")

    def shade(self, value: float) -> float:
        """How dark a value is, 0 to 1."""
        return min(max((value - self.pale) / (self.dark - self.pale), 0.0), 1.0)

    def cell(self, value: float | None) -> str:
        """A value as it is written."""
        if value is None:
            return "-"
        if not self.percent:
            return format_number(value, self.digits)
        return "0%" if value == 0 else "<0.1%" if value < 0.001 else f"{value:.{1 if value < 0.1 else 0}%}"

    def to_text(self) -> str:
        """Title and one line a row."""
        lines = [f"{self.title} ({self.value_label})"]
        for name, row in zip(self.rows, self.values, strict=True):
            cells = ", ".join(f"{column} {self.cell(v)}" for column, v in zip(self.columns, row, strict=True))
            lines.append(f"  {name}: {cells}")
        return "\n".join(lines)


Chart = LineChart | ExponentHistogram | BarChart | HeatMap
