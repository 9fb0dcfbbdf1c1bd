"""Lines that lie on each other: which, how far apart at most, and a picture of the difference."""

from __future__ import annotations

import math
import statistics
from itertools import combinations

from .axis import fit
from .charts import LineChart, Series
from .values import format_number

CLOSE = 0.015
"""Lines lie on each other where most points of them are nearer than this share of the chart's height."""


def overlap_note(chart: LineChart) -> str:
    """A sentence on the lines of a chart that cannot be told apart, with their largest difference; "" if all can."""
    reference = _reference(chart)
    if reference is None:
        pairs = [*combinations(chart.series, 2)]
    else:
        pairs = [(series, reference) for series in chart.series if series is not reference]
    groups: list[tuple[set[str], list[tuple[float, float]]]] = []
    for one, other in pairs:
        gaps = differences(one, other)
        if not gaps or _apart(chart, one, other) > CLOSE:
            continue
        names = {one.name, other.name}
        for group in [group for group in groups if group[0] & names]:
            groups.remove(group)
            names, gaps = names | group[0], gaps + group[1]
        groups.append((names, gaps))
    return " ".join(_told(chart, *group) for group in groups)


def _told(chart: LineChart, names: set[str], gaps: list[tuple[float, float]]) -> str:
    x, gap = max(gaps, key=lambda pair: abs(pair[1]))
    *first, last = (series.name for series in chart.series if series.name in names)
    subject = f"{', '.join(first)} and {last}"
    if not gap:
        return f"{subject} are the same."
    whom = f" from {chart.against}" if chart.against else ""
    return (
        f"{subject} lie on each other: the largest difference{whom} is {format_number(abs(gap), None)}, at "
        f"{chart.x_label} {format_number(int(x) if x.is_integer() else x)}."
    )


def difference_chart(chart: LineChart) -> LineChart | None:
    """How far each line is from the line `against`; None if none is named, or none lies on it."""
    reference = _reference(chart)
    if reference is None or not overlap_note(chart):
        return None
    lines = []
    for series in chart.series:
        gaps = [] if series is reference else differences(series, reference)
        if gaps:
            lines.append(Series(series.name, [x for x, _ in gaps], [gap for _, gap in gaps]))
    ends = [x for line in lines for x in line.x if x is not None]
    level = Series(reference.name, [min(ends), max(ends)], [0.0, 0.0], dashed=True)
    return LineChart(f"Difference from {reference.name}", chart.x_label, chart.y_label, (*lines, level))


def differences(one: Series, other: Series) -> list[tuple[float, float]]:
    """The places that two lines have in common, with the first minus the second there."""
    there = {x: y for x, y in zip(other.x, other.y, strict=True) if x is not None and y is not None}
    pairs = zip(one.x, one.y, strict=True)
    return [(x, y - there[x]) for x, y in pairs if x is not None and y is not None and x in there]


def _reference(chart: LineChart) -> Series | None:
    return next((series for series in chart.series if chart.against and series.name == chart.against), None)


def _apart(chart: LineChart, one: Series, other: Series) -> float:
    """The median distance of two lines, as a share of the height of the chart."""
    axis = fit(
        (y for series in chart.series for y in series.y),
        "log2" if chart.y_log2 else "log10" if chart.y_log else "linear",
    )
    there = dict(zip(other.x, other.y, strict=True))
    found = []
    for x, y in zip(one.x, one.y, strict=True):
        a, b = axis.transform(y), axis.transform(there.get(x))
        if a is not None and b is not None:
            found.append(abs(a - b) / (axis.high - axis.low))
    return statistics.median(found) if found else math.inf
