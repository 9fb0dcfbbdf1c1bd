"""What is said of the rows of training suites: a line for each contender, and the table at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...report import Cell, Column, Table
from .._race import INTERVAL, RATIO, spread_text
from .._results import Row

_BESIDES = ("loss", "against fp32", "skips", "batch", "layers", "parameters")


def lines(row: Row) -> list[str]:
    """The lines printed for a row, one for each contender."""
    if "dropped" in row.about:
        return [f"{row.name}: dropped, {row.about['dropped']}"]
    if "error" in row.about:
        return [f"{row.name}: {row.about['error']}"]
    if not row.contenders:
        return [f"{row.name}: " + ", ".join(f"{key} {_short(value)}" for key, value in row.about.items())]
    return [f"{row.name}: {each['name']}: {_in_words(each)}" for each in row.contenders]


def _in_words(each: dict[str, Any]) -> str:
    if each.get("error"):
        return f"failed: {each['error']}"
    said = []
    if "stats" in each:
        said.append(f"{1e3 * each['stats']['median']:.3f} ms")
    if each.get("ratio"):
        said.append(spread_text(each["ratio"]))
    if each.get("peak bytes"):
        said.append(f"{each['peak bytes'] / 2**20:.0f} MiB")
    said += [f"{key} {_short(each[key])}" for key in ("waits", "launches", "roofline") if each.get(key) is not None]
    said += [f"{key} {_short(each[key])}" for key in _BESIDES if key in each]
    if each.get("not counted"):
        said.append(f"launches not counted: {each['not counted']}")
    return ", ".join(said)


def why_not(about: Mapping[str, Any]) -> str | None:
    """Why a row, or a contender, has no figures: left out, failed, or what no such device has."""
    reasons = {"dropped": "dropped", "error": "failed", "not measured": "not measured"}
    return next((f"{words}: {about[key]}" for key, words in reasons.items() if about.get(key)), None)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{len(value)}" if isinstance(value, list) else str(value)


def training_table(suite: str, rows: Sequence[Row], hardware: str) -> Table:
    """What is printed at the end: every contender of every part."""
    columns = ("work", "contender", Column("median", "ms", 3), Column("ratio", "x", 3), Column("low", "x", 3),
               Column("high", "x", 3), Column("peak", "MiB", 0), Column("waits", digits=1),
               Column("launches", digits=0), Column("roofline", "%", 0), "besides")  # fmt: skip
    cells: list[tuple[Cell, ...]] = []
    for row in rows:
        if why := why_not(row.about):
            cells.append((row.name, "-", *[None] * 8, why))
        cells += [_cells(row.name, each) for each in row.contenders]
    notes = (
        RATIO,
        INTERVAL,
        "waits: times a step that the host waits for the device; launches: kernels of a step",
        "roofline: share of what products and the optimizer's memory traffic would need at the speeds measured first",
    )
    return Table(f"Suite {suite} on {hardware}", columns, cells, notes)


def _cells(work: str, each: dict[str, Any]) -> tuple[Cell, ...]:
    if why := why_not(each):
        return (work, each["name"], *[None] * 8, why)
    ratio, stats, peak, roofline = each.get("ratio"), each.get("stats"), each.get("peak bytes"), each.get("roofline")
    ratios: tuple[Cell, ...] = (ratio["median"], ratio["low"], ratio["high"]) if ratio else (None, None, None)
    besides = [f"{key} {_short(each[key])}" for key in _BESIDES if key in each]
    return (
        work, each["name"], 1e3 * stats["median"] if stats else None, *ratios, peak / 2**20 if peak else None,
        each.get("waits"), each.get("launches"), 100 * roofline if roofline else None, ", ".join(besides),
    )  # fmt: skip
