"""The rows of the suite as its report reads them: from JSON, by network, with what is not there as None."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._race import spread
from ..training._contenders import REFERENCE
from ..training._rows import why_not
from ..training._works import works
from ._suite import NETWORKS

COMPILED = ", compiled"


@dataclass(frozen=True)
class Figure:
    """A value with the interval that holds the true median, where it has one."""

    value: float
    low: float | None = None
    high: float | None = None


class Measured:
    """Rows, as a bench's JSON has them under the suite's name."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = rows
        self._by_name = {str(row["name"]): row for row in rows}

    @property
    def networks(self) -> list[str]:
        """Names of networks that there is a row of, in the order of the suite."""
        names = [work.name for work in (works("full")[network.key] for network in NETWORKS)]
        measured = [row.removesuffix(COMPILED) for row in self._by_name]
        return [name for name in names if any(row.endswith(name) for row in measured)]

    @property
    def tiny(self) -> bool:
        """Whether one of the rows is of the size that shows only that the suite works."""
        return any(row.get("size", "full") != "full" for row in self.rows)

    def row(self, name: str) -> Mapping[str, Any]:
        """A row by its name; empty if there is none."""
        return self._by_name.get(name, {})

    def contenders(self, name: str) -> list[str]:
        """Who has figures in a row, without the word that they were compiled."""
        every = self.row(name).get("contenders", ())
        return [str(each["name"]).removesuffix(COMPILED) for each in every if not each.get("error")]

    def of(self, name: str, contender: str, key: str) -> Any:
        """What was found of a contender in a row, under a key; None if nothing was."""
        for each in self.row(name).get("contenders", ()):
            if each["name"] in (contender, contender + COMPILED) and not each.get("error"):
                return each.get(key)
        return None

    def speed(self, name: str, contender: str) -> Figure | None:
        """How many times as fast as torch.amp in float16 in the same row, by rounds."""
        found = self.of(name, contender, "ratio")
        return None if found is None else Figure(found["median"], found["low"], found["high"])

    def milliseconds(self, name: str, contender: str) -> Figure | None:
        """Time of a step: the median over rounds of each round's median."""
        seconds = self.of(name, contender, "seconds")
        if not seconds:
            return None
        found = spread(seconds)
        return Figure(1e3 * found["median"], 1e3 * found["low"], 1e3 * found["high"])

    def share(self, name: str, contender: str, key: str) -> Figure | None:
        """A figure over that of torch.amp in float16."""
        own, theirs = (self.of(name, each, key) for each in (contender, REFERENCE.name))
        return Figure(own / theirs) if own and theirs else None

    def scaled(self, name: str, contender: str, key: str, unit: float) -> Figure | None:
        """A figure in a unit."""
        found = self.of(name, contender, key)
        return Figure(found / unit) if found else None

    def absent(self) -> Iterator[tuple[str, str, str]]:
        """Row, contender ("-": all of them), and why there is no figure."""
        for row in self.rows:
            name, why, short = str(row["name"]), why_not(row), row.get("cut short")
            failed = [each for each in row.get("contenders", ()) if each.get("error")]
            yield from ((name, str(each["name"]), str(each["error"])) for each in failed)
            if why or (short and not failed):
                yield name, "-", str(why or short)
