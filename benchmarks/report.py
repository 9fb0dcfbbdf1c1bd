"""What is made of rows: a table for each as it comes, and one page with pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from preamp.report import BarChart, Bars, Cell, Column, Item, LineChart, Report, Section, Series, Table, smoothed

FIGURES: dict[str, tuple[Column, float]] = {
    "time": (Column("median", "ms", 3), 1e3), "ratio": (Column("ratio", "x", 3), 1), "low": (Column("low", "x", 3), 1),
    "high": (Column("high", "x", 3), 1), "peak bytes": (Column("peak", "MiB", 0), 2**-20),
    "launches": (Column("launches", digits=0), 1), "loss": (Column("final loss", digits=4), 1),
    "against fp32": (Column("against fp32", "%", 3), 100), "skipped": (Column("skips", digits=0), 1),
    "batch": (Column("batch", digits=0), 1), "bytes": (Column("moved", "MB", 2), 1e-6),
    "casts": (Column("casts", digits=0), 1), "calls": (Column("calls", digits=0), 1),
    "waits": (Column("waits", digits=1), 1),
}  # fmt: skip
"""By key, the column of a figure, and by what it is multiplied there."""

NOTES = (
    "ratio: time of the first contender / time of this one, median over rounds; above 1 is faster",
    "low, high: hold the true median with 95 % or more; of fewer than 6 rounds they are smallest and largest",
)

Rows = Sequence[Mapping[str, Any]]  # of a suite, as the file has them


def table(title: str, rows: Rows, notes: Sequence[str] = ()) -> Table:
    """Every contender of every row, with the figures that any of them has; or why it has none."""
    every = [(str(row["name"]), each) for row in rows for each in row.get("contenders", ())]
    every += [
        (str(row["name"]), {"name": "-", "error": why})
        for row in rows
        if (why := row.get("error") or row.get("not measured"))
    ]
    figures = [_figures(each) for _, each in every]
    told = [key for key in FIGURES if any(own.get(key) is not None for own in figures)]
    cells: list[tuple[Cell, ...]] = []
    for (name, each), own in zip(every, figures, strict=True):
        numbers = [None if own.get(key) is None else own[key] * FIGURES[key][1] for key in told]
        cells.append((name, each["name"], *numbers, each.get("error")))
    return Table(title, ("work", "contender", *(FIGURES[key][0] for key in told), "failed"), cells, notes)


def _figures(each: Mapping[str, Any]) -> dict[str, Any]:
    ratio = each.get("ratio") or {}
    times = {"time": each.get("stats", {}).get("median"), "ratio": ratio.get("median")}
    skips = {"skipped": len(each["skips"])} if "skips" in each else {}
    return {**each, **each.get("counts", {}), **times, "low": ratio.get("low"), "high": ratio.get("high"), **skips}


def report(suites: Mapping[str, Rows], environment: Mapping[str, Any]) -> Report:
    """The page of the suites in a file, complete or not."""
    ours = [ratio for rows in suites.values() for ratio in _ratios(rows) if "preamp" in ratio[1]]
    ours.sort(key=lambda ratio: ratio[2]["median"])
    ends = [*ours[:3], *ours[-3:]] if len(ours) > 6 else ours
    sections = []
    for name, rows in suites.items():
        ratios = [*_ratios(rows)]
        items: list[Item] = [_chart(f"{name}, all contenders", ratios)] if ratios else []
        items += [_curves(row) for row in rows if any(each.get("losses") for each in row.get("contenders", ()))]
        sections.append(Section(name, "", [*items, table(name, rows, NOTES)]))
    hardware = environment.get("gpu") or environment.get("cpu")
    faster, slower = sum(ratio["low"] > 1 for *_, ratio in ours), sum(ratio["high"] < 1 for *_, ratio in ours)
    verdict = (
        f"On {hardware}: faster than the reference in {faster} of {len(ours)} comparisons, slower in {slower}, not "
        f"told apart in {len(ours) - faster - slower}."
    )
    if any(row.get("tiny") for rows in suites.values() for row in rows):
        verdict = f"Tiny works on {hardware}: the benchmarks run; this says nothing about speed."
    picture = _chart("preamp's speed" + ", the least and the most" * (len(ours) > 6), ends) if ends else None
    return Report(
        f"Benchmarks: {', '.join(suites)}", verdict, sections, picture=picture, environment=environment,
        status="neutral", advice="Where a whisker meets 1, more rounds help:", paste="./dev bench --again --rounds 41",
    )  # fmt: skip


def _ratios(rows: Rows) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Work, contender and ratio, of all but references."""
    for row in rows:
        for each in [*row.get("contenders", ())][1:]:
            if each.get("ratio"):
                yield str(row["name"]), str(each["name"]), each["ratio"]


def _chart(title: str, ratios: Sequence[tuple[str, str, Mapping[str, Any]]]) -> BarChart:
    medians, lows, highs = ([ratio[name] for *_, ratio in ratios] for name in ("median", "low", "high"))
    labels = [f"{work}: {contender}" for work, contender, _ in ratios]
    value, note = (
        "times as fast as the reference of its row",
        "Bars begin at 1. Whiskers hold the true median with 95 % or more.",
    )
    return BarChart(title, labels, [Bars("ratio", medians, lows, highs)], value, base=1.0, digits=2, note=note)


def _curves(row: Mapping[str, Any]) -> LineChart:
    """Where training goes by every contender, against the first."""
    runs = {each["name"]: each["losses"] for each in row["contenders"] if each.get("losses")}
    curves = {who: smoothed([math.nan if loss is None else loss for loss in own]) for who, own in runs.items()}
    lines = [Series(who, range(len(curve)), curve) for who, curve in curves.items()]
    return LineChart(f"{row['name']}: loss, smoothed", "step", "loss", lines, against=lines[0].name)
