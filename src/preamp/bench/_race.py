"""Timing that survives a busy machine: contenders take turns, and each round gives a ratio."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch

from ..report import Column, Table


@dataclass(frozen=True, slots=True)
class Outcome:
    """A contender's times (s a call, one a round), and its ratios to the reference, round by round.

    A ratio above 1 means that the contender is faster than the reference.
    """

    name: str
    seconds: tuple[float, ...]
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median of the rounds' ratios."""
        return statistics.median(self.ratios)

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
            "ratio": {"median": self.ratio, "min": min(self.ratios), "max": max(self.ratios)},
        }


@dataclass(frozen=True)
class Row:
    """One comparison: contenders on one piece of work, the first being the reference."""

    name: str
    what: str
    outcomes: list[Outcome]
    counts: Mapping[str, Mapping[str, int | None]] = field(default_factory=dict)
    """By contender, what one call of it does, where that was counted."""

    def to_dict(self) -> dict[str, Any]:
        """Every outcome."""
        rows = [{**outcome.to_dict(), **self._counted(outcome.name)} for outcome in self.outcomes]
        return {"name": self.name, "what": self.what, "contenders": rows}

    def _counted(self, name: str) -> dict[str, Any]:
        return {"counts": dict(self.counts[name])} if name in self.counts else {}


def race(
    contenders: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 15,
    number: int = 1,
    device: torch.device | None = None,
    on_round: Callable[[int], None] = lambda index: None,
) -> list[Outcome]:
    """Time contenders interleaved, `number` calls each a round; the first one is the reference.

    Rounds go through `orders`, so that what one contender leaves in the caches favours nobody.
    """
    names = list(contenders)
    for name in names:  # warm up
        contenders[name]()
    turns = cycle([names[place] for place in order] for order in orders(len(names)))
    times: dict[str, list[float]] = {name: [] for name in names}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for index in range(rounds):
            for name in next(turns):
                call = contenders[name]
                started = _now(device)
                for _ in range(number):
                    call()
                times[name].append((_now(device) - started) / number)
            on_round(index)
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


def _now(device: torch.device | None) -> float:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def race_table(name: str, rows: Sequence[Row]) -> Table:
    """Medians and ratios of races, and what was counted of each contender."""
    counted = any(row.counts for row in rows)
    columns = [Column("work"), Column("contender"), Column("median", "us", 1), Column("ratio", "x", 3),
               Column("smallest", "x", 3), Column("largest", "x", 3)]  # fmt: skip
    if counted:
        columns += [Column("moved", "MB", 2), *(Column(what, digits=0) for what in ("casts", "calls", "waits"))]
    cells = []
    for row in rows:
        for outcome in row.outcomes:
            median, ratios = statistics.median(outcome.seconds), outcome.ratios
            cell: list[str | int | float | bool | None]
            cell = [row.name, outcome.name, 1e6 * median, outcome.ratio, min(ratios), max(ratios)]
            found = row.counts.get(outcome.name, {})
            if counted:
                moved = found.get("bytes")
                cell += [
                    None if moved is None else moved / 1e6,
                    *(found.get(what) for what in ("casts", "calls", "waits")),
                ]
            cells.append(tuple(cell))
    notes = ("ratio: time of the first contender / time of this one, median over rounds; above 1 is faster",)
    return Table(f"Suite {name}", tuple(columns), cells, notes)
