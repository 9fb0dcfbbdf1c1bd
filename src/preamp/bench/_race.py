"""Timing that survives a busy machine: contenders take turns, and each round gives a ratio."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

from ..report import Cell, Column, Table
from ._machine import seconds_now
from ._results import Row


@dataclass(frozen=True, slots=True)
class Outcome:
    """A contender's times (s a call, one a round), and its ratios to the reference, round by round.

    A ratio above 1 means that the contender is faster than the reference.
    """

    name: str
    seconds: tuple[float, ...]
    ratios: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Statistics and all samples; key names are those of pytest-benchmark's `stats`."""
        return {
            "name": self.name,
            "stats": {
                "min": min(self.seconds),
                "max": max(self.seconds),
                "mean": statistics.fmean(self.seconds),
                "stddev": statistics.stdev(self.seconds) if len(self.seconds) > 1 else 0.0,
                "median": statistics.median(self.seconds),
                "rounds": len(self.seconds),
            },
            "seconds": list(self.seconds),
            "ratio": spread(self.ratios),
        }


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest; and `low` to `high`, which holds the true median with probability `confidence`.

    That is the narrowest interval between two of the values, as far from either end, with 95 % or more, and all of them
    if they are fewer than six: the sign test's, which asks nothing of how times are distributed.
    """
    ordered, count = sorted(ratios), len(ratios)
    outside = 1  # of 2 ** count patterns of values below and above the median, those that leave it out on one side
    taken = 0
    while 2 * (more := outside + math.comb(count, taken + 1)) <= 0.05 * 2**count:
        outside, taken = more, taken + 1
    return {
        "median": statistics.median(ordered), "min": ordered[0], "max": ordered[-1],
        "low": ordered[taken], "high": ordered[-1 - taken], "confidence": 1 - 2 * outside / 2**count,
    }  # fmt: skip


def spread_text(found: Mapping[str, float]) -> str:
    """The median with its interval behind it."""
    return f"x{found['median']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def race(
    contenders: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 15,
    number: int = 1,
    device: torch.device | None = None,
) -> list[Outcome]:
    """Time contenders interleaved, `number` calls each a round; the first one is the reference.

    Rounds go through `orders`, so that what one contender leaves in the caches favours no other.
    """
    names = list(contenders)
    for name in names:  # warm up
        contenders[name]()
    turns = cycle([names[place] for place in order] for order in orders(len(names)))
    times: dict[str, list[float]] = {name: [] for name in names}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name in next(turns):
                call = contenders[name]
                started = seconds_now(device)
                for _ in range(number):
                    call()
                times[name].append((seconds_now(device) - started) / number)
    finally:
        if collecting:
            gc.enable()
    reference = times[names[0]]
    return [
        Outcome(name, tuple(times[name]), tuple(r / t for r, t in zip(reference, times[name], strict=True)))
        for name in names
    ]


def orders(number: int) -> list[list[int]]:
    """Orders of `number` things, one a round, in which each follows every other equally often, and none itself.

    Williams (1949), "Experimental designs balanced for the estimation of residual effects of treatments".
    """
    if number < 3:
        return [list(range(number))]
    zigzag = [0]
    for step in range(1, number):
        zigzag.append((zigzag[-1] + (step if step % 2 else -step)) % number)
    left = [[(place + shift) % number for place in zigzag] for shift in range(number)]
    if number % 2:
        left += [order[::-1] for order in left]
    chosen = [left.pop(0)]
    while left:  # from one round to the next, too
        chosen.append(left.pop(next(i for i, order in enumerate(left) if order[0] != chosen[-1][-1])))
    return chosen


RATIO = "ratio: time of the first contender / time of this one, median over rounds; above 1 is faster"
INTERVAL = "low, high: hold the true median with 95 % or more; of fewer than 6 rounds they are smallest and largest"


def race_row(
    name: str, what: str, outcomes: Sequence[Outcome], counts: Mapping[str, Mapping[str, Any]] | None = None
) -> Row:
    """A race; `counts`: by contender, what one call of it does, where that was counted."""
    counted = {who: {"counts": dict(found)} for who, found in (counts or {}).items()}
    return Row(name=name, what=what, contenders=[{**each.to_dict(), **counted.get(each.name, {})} for each in outcomes])


def race_table(name: str, rows: Sequence[Row], hardware: str) -> Table:
    """Medians and ratios of races, and what was counted of each contender."""
    columns: list[Column | str] = ["work", "contender", Column("median", "us", 1)]
    columns += [Column(what, "x", 3) for what in ("ratio", "low", "high")]
    figures: tuple[str, ...] = ()
    if any("counts" in each for row in rows for each in row.contenders):
        figures = ("casts", "calls", "waits")
        columns += [Column("moved", "MB", 2), *(Column(what, digits=0) for what in figures)]
    cells: list[Sequence[Cell]] = []
    for row in rows:
        if why := row.about.get("error"):
            cells.append((row.name, f"failed: {why}", *[None] * (len(columns) - 2)))
        for each in row.contenders:
            ratio, found = each["ratio"], each.get("counts", {})
            cell: list[Cell] = [row.name, each["name"], 1e6 * each["stats"]["median"]]
            cell += [ratio["median"], ratio["low"], ratio["high"]]
            if figures:
                moved = found.get("bytes")
                cell += [None if moved is None else moved / 1e6, *(found.get(what) for what in figures)]
            cells.append(cell)
    return Table(f"Suite {name} on {hardware}", columns, cells, (RATIO, INTERVAL))
