"""Lines that lie on each other: which, how far apart at most, and a picture of the difference."""

from __future__ import annotations

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
    groups: list[_Group] = []
    for one, other in pairs:
        apart, gaps = _apart(chart, one, other), differences(one, other)
        if not apart or statistics.median(apart) > CLOSE:
            continue
        names, most = {one.name, other.name}, max(apart)
        for group in [group for group in groups if group[0] & names]:
            groups.remove(group)
            names, most, gaps = names | group[0], max(most, group[1]), gaps + group[2]
        groups.append((names, most, gaps))
    return " ".join(_told(chart, *group) for group in groups)


_Group = tuple[set[str], float, list[tuple[float, float]]]
"""Names of lines, how far apart they are at most as a share of the height, and their differences."""


def _told(chart: LineChart, names: set[str], most: float, gaps: list[tuple[float, float]]) -> str:
    x, gap = max(gaps, key=lambda pair: abs(pair[1]))
    *first, last = (series.name for series in chart.series if series.name in names)
    lines = f"{', '.join(first)} and {last}"
    if not gap:
        return f"Lines that are the same: {lines}."
    mostly = "" if most <= 2 * CLOSE else "mostly "
    whom = f" from {chart.against}" if chart.against else ""
    return (
        f"Lines that {mostly}lie on each other: {lines}; the largest difference{whom} is {format_number(abs(gap))}, at "
        f"{chart.x_label} {format_number(int(x) if x.is_integer() else x)}."
    )


def difference_chart(chart: LineChart) -> LineChart | None:
    """How far each line is from the line `against`; None if none is named, or none has a place in common with it."""
    reference = _reference(chart)
    if reference is None:
        return None
    gaps = [differences(series, reference) for series in chart.series]
    ends = [x for series, many in zip(chart.series, gaps, strict=True) if series is not reference for x, _ in many]
    if not ends:
        return None
    lines = []
    for series, many in zip(chart.series, gaps, strict=True):  # in their order, so that each keeps its colour
        ours = [(min(ends), 0.0), (max(ends), 0.0)] if series is reference else many
        lines.append(Series(series.name, [x for x, _ in ours], [gap for _, gap in ours], dashed=series.dashed))
    return LineChart(f"Difference from {reference.name}", chart.x_label, chart.y_label, lines, x_log=chart.x_log)


def differences(one: Series, other: Series) -> list[tuple[float, float]]:
    """The places that two lines have in common, with the first minus the second there."""
    there = {x: y for x, y in zip(other.x, other.y, strict=True) if x is not None and y is not None}
    pairs = zip(one.x, one.y, strict=True)
    return [(x, y - there[x]) for x, y in pairs if x is not None and y is not None and x in there]


def _reference(chart: LineChart) -> Series | None:
    return next((series for series in chart.series if chart.against and series.name == chart.against), None)


def _apart(chart: LineChart, one: Series, other: Series) -> list[float]:
    """The distances of two lines, as shares of the height of the chart."""
    axis = fit((y for series in chart.series for y in series.y), "log2" if chart.y_log2 else "linear")
    there = dict(zip(other.x, other.y, strict=True))
    found = []
    for x, y in zip(one.x, one.y, strict=True):
        a, b = axis.transform(y), axis.transform(there.get(x))
        if a is not None and b is not None:
            found.append(abs(a - b) / (axis.high - axis.low))
    return found
