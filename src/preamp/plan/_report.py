"""The report of a plan: what a rank holds, in a picture, and what the same run would take in other ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..formats import name_of
from ..report import BarChart, Bars, Cell, Column, Report, Section, Table
from ._plan import MemoryPlan

_GIB = 2**30

_ON_TOP = {"held": "", "passes": " (in the passes)", "step": " (in the step)"}


def plan_report(made: MemoryPlan, others: Mapping[str, MemoryPlan], commands: Mapping[str, str]) -> Report:
    """The page of a plan. `others`: plans of the same run in other ways; `commands`: what to type for each of them."""
    advice, paste = _advice(made, others, commands)
    rows = _ways(made, others)
    peak = f", and {_gib(made.peak)} at the peak of a step" if made.peak > made.total else ", as much at its peak"
    ways = Table("The same run, in other ways", ("way", *(Column(n, "GiB", 2) for n in ("held", "peak", "sent"))), rows)
    return Report(
        "preamp plan",
        f"{_who(made)} holds {_gib(made.total)}{peak}, without activations.",
        [Section("Every kind of bytes", "", (made.to_table(),)), Section("Other ways", "", (ways,))],
        picture=_picture(made),
        advice=advice,
        paste=paste,
        environment={"plan": made.title, **{name: value for name, value in made.asked.items() if value is not None}},
        data=made.to_json(),
        status="neutral",
    )


def _who(made: MemoryPlan) -> str:
    world: Any = made.asked["world"]
    return "A single process" if world == 1 else f"Each of {world} ranks"


def _gib(number: int) -> str:
    return f"{number / _GIB:,.2f} GiB"


def _picture(made: MemoryPlan) -> BarChart:
    """The bytes of a rank, by kind; what is there for a part of the step only is marked."""
    sizes: dict[str, int] = {}
    for row in made.rows:
        if row.when in _ON_TOP:
            name = f"{row.kind}, {name_of(row.dtype)}{_ON_TOP[row.when]}"
            sizes[name] = sizes.get(name, 0) + row.bytes
    bars = Bars("size", [size / _GIB for size in sizes.values()])
    return BarChart("What a rank holds", [*sizes], [bars], "GiB", digits=2)


def _ways(made: MemoryPlan, others: Mapping[str, MemoryPlan]) -> list[tuple[Cell, ...]]:
    """The plan and the others, the smallest peak first."""
    named = {f"this plan ({made.asked['level'] or made.asked['policy']})": made, **others}
    ordered = sorted(named.items(), key=lambda item: item[1].peak)
    return [(name, each.total / _GIB, each.peak / _GIB, each.sent / _GIB) for name, each in ordered]


def _advice(made: MemoryPlan, others: Mapping[str, MemoryPlan], commands: Mapping[str, str]) -> tuple[str, str]:
    """What to do, in words, and what to paste for it."""
    room = "Leave room for activations, which depend on the batch. "
    asked = f'level="{made.asked["level"]}"' if made.asked["level"] else f'policy="{made.asked["policy"]}"'
    name = min(others, key=lambda name: others[name].peak, default=None)
    if name is None or others[name].peak >= made.peak:
        return f"{room}No other way of this run takes less:", f"preamp.prepare(model, optimizer, {asked})"
    saved = made.peak - others[name].peak
    return f"{room}If it does not fit: {name} takes {_gib(saved)} less at the peak:", commands[name]
