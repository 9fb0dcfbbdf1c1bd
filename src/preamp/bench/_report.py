"""The report of a bench: how fast each contender is beside its reference, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..report import BarChart, Bars, Column, Item, Report, Section, Table
from ._race import INTERVAL, RATIO
from .models import report as models_report

SHOWN = 6
"""Bars on the first screen at most: those of preamp's contenders that gain least and most."""

ADVICE = "Where a whisker crosses 1, more `--rounds` would tell. What whole networks gain here:"

Rows = Sequence[Mapping[str, Any]]
"""Rows of a suite, as a bench's JSON has them."""


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as the reference a contender is, with the interval that holds the true median."""

    suite: str
    row: str
    contender: str
    reference: str
    median: float
    low: float
    high: float
    seconds: float | None

    @property
    def ours(self) -> bool:
        """Whether something of preamp's was measured, and not another way of torch's."""
        return "preamp" in self.contender

    @property
    def label(self) -> str:
        """Row and contender."""
        return f"{self.row}: {self.contender}"


def bench_report(suites: Mapping[str, Rows], environment: Mapping[str, Any]) -> Report:
    """The report of the suites in a bench's JSON; the suite `models` alone has one of its own."""
    models = models_report(suites["models"], environment) if "models" in suites else None
    if models is not None and len(suites) == 1:
        return models
    found = [ratio for name, rows in suites.items() if name != "models" for ratio in _ratios(name, rows)]
    ours = sorted((ratio for ratio in found if ratio.ours), key=lambda ratio: ratio.median)
    ends = ours if len(ours) <= SHOWN else [*ours[: SHOWN // 2], *ours[-SHOWN // 2 :]]
    sections = []
    for name, rows in suites.items():
        own = [ratio for ratio in found if ratio.suite == name]
        charts = [] if set(own) <= set(ends) else [_chart(f"{name}, all contenders", own)]
        items: list[Item] = [*charts, _table(own)] if own else []
        whys = [(str(row["name"]), str(why)) for row in rows if (why := row.get("error") or row.get("dropped"))]
        items += [Table("Without a figure", ("row", "why"), whys)] if whys and name != "models" else []
        sections += [Section(name, "", items)] if items else []
    title = "preamp's speed" + (", the least and the most" if len(ours) > SHOWN else "")
    return Report(
        f"preamp bench: {', '.join(suites)}",
        verdict(ours, environment),
        [*sections, *(models.sections if models is not None else ())],
        picture=_chart(title, ends) if ends else None,
        advice=ADVICE if ours else "",
        paste="preamp bench --suite models" if ours else "",
        environment=environment,
        status="neutral",
    )


def verdict(ours: Sequence[Ratio], environment: Mapping[str, Any]) -> str:
    """The one line to remember."""
    hardware = environment.get("gpu") or environment.get("cpu")
    if not ours:
        return f"Nothing of preamp on {hardware} has a ratio to a reference: see the tables that were printed."
    faster, slower = sum(ratio.low > 1 for ratio in ours), sum(ratio.high < 1 for ratio in ours)
    return (
        f"On {hardware}: faster than the reference in {faster} of {len(ours)} comparisons, slower in {slower}, "
        f"not told apart in {len(ours) - faster - slower}; {ours[0].median:.2f} to {ours[-1].median:.2f} times as fast."
    )


def _ratios(suite: str, rows: Rows) -> Iterator[Ratio]:
    for row in rows:
        every = [each for each in row.get("contenders", ()) if not each.get("error")]
        if len(every) < 2:
            continue
        for each in every[1:]:
            ratio = each.get("ratio")
            if isinstance(ratio, Mapping):
                seconds = each["stats"]["median"] if "stats" in each else None
                names = (str(row["name"]), str(each["name"]), str(every[0]["name"]))
                yield Ratio(suite, *names, ratio["median"], ratio["low"], ratio["high"], seconds)


def _chart(title: str, ratios: Sequence[Ratio]) -> BarChart:
    references = {ratio.reference for ratio in ratios}
    value = f"times as fast as {references.pop() if len(references) == 1 else 'the reference of the row'}"
    medians, lows, highs = ([getattr(r, name) for r in ratios] for name in ("median", "low", "high"))
    bars = Bars("ratio", medians, lows, highs)
    note = "Above 1 is faster. Whiskers hold the true median with 95 % or more."
    return BarChart(title, [ratio.label for ratio in ratios], [bars], value, digits=2, note=note)


def _table(ratios: Sequence[Ratio]) -> Table:
    rows = [(r.row, r.contender, r.reference, r.seconds and 1e6 * r.seconds, r.median, r.low, r.high) for r in ratios]
    ratio = (Column(name, "x", 3) for name in ("ratio", "low", "high"))
    columns: tuple[str | Column, ...] = ("work", "contender", "reference", Column("median", "us", 1), *ratio)
    return Table("Times and ratios", columns, rows, notes=(RATIO, INTERVAL))
