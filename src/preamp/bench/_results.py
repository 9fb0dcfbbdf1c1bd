"""The rows of a bench, in a file that is rewritten after each row, together with rows of earlier runs."""

from __future__ import annotations

import json
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..report import to_json
from ..report.files import write_json
from ..report.values import format_left

SCHEMA = "preamp-bench/1"
BEGUN = "begun, and the process ended before it was measured"
"""The error of a row that a crash or a kill broke off."""

MEASURED_ON = "measured on"
"""Key of a row under which it says where: device, torch, commit."""

FRAMES = 12
"""The number of innermost frames of a traceback that are reported."""

T = TypeVar("T")


class AnyRow(Protocol):
    """What suites give."""

    def to_dict(self) -> dict[str, Any]:
        """It in types that JSON takes; `name` is its own within the suite."""
        ...


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was done, and what was found of each contender, the first being the reference.

    `part`, of a training suite: machine, optimizer, steps, compiled, parity, losses, largest batch or larger net.
    `contenders`: one mapping each, with `name` and either `error` or what was measured; times in seconds, memory in
    bytes. `about`: what all of them share; `dropped` in it says why the part was left out, `cut short` why contenders
    or rounds were, `error` why it failed, `not measured` why such a device has no such figure.
    """

    name: str
    what: str = ""
    contenders: Sequence[dict[str, Any]] = ()
    about: dict[str, Any] = field(default_factory=dict)
    part: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Everything; numbers that are not finite become null."""
        part = {"part": self.part} if self.part else {}
        plain: dict[str, Any] = to_json(
            {**part, "name": self.name, "what": self.what, **self.about, "contenders": self.contenders}
        )
        return plain


@dataclass(frozen=True)
class Missing:
    """Which rows of a suite are still to be measured, by name. `begin` hears of each before it is."""

    done: frozenset[str] = frozenset()
    tried: frozenset[str] = frozenset()
    """Those that failed: they come after those not yet tried, which they could lose if they crash again."""
    begin: Callable[[str], None] = lambda name: None

    def any(self, rows: Iterable[T], name: Callable[[T], str]) -> bool:
        """Whether one of `rows` is missing."""
        return any(name(row) not in self.done for row in rows)

    def of(self, rows: Iterable[T], name: Callable[[T], str]) -> Iterator[T]:
        """Those of `rows` that are missing, in the order in which they are to be measured."""
        return (row for _, row in self.numbered(rows, name))

    def numbered(self, rows: Iterable[T], name: Callable[[T], str]) -> Iterator[tuple[str, T]]:
        """As `of`, each with its place and the time that is left, by the rows before it: "2 of 7, about 90 s left"."""
        left = [row for row in rows if name(row) not in self.done]
        began = time.perf_counter()
        for done, row in enumerate(sorted(left, key=lambda row: name(row) in self.tried)):
            self.begin(name(row))
            each = (time.perf_counter() - began) / max(done, 1)
            yield f"{done + 1} of {len(left)}" + (f", {format_left(each * (len(left) - done))}" if done else ""), row


EVERYTHING = Missing()


def complete(row: Mapping[str, Any]) -> bool:
    """Whether a row, in its JSON, lacks nothing that another run could measure."""
    if row.get("error") or "dropped" in row or "cut short" in row:
        return False
    contenders = row.get("contenders", ())
    return not contenders or not all(each.get("error") for each in contenders)


def described(error: BaseException) -> str:
    """The kind of an error and its first line."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first.strip()}"[:300]


def failure(who: str, error: BaseException, tell: Callable[[str], None]) -> str:
    """`described(error)`; its traceback is reported at once, as a device may be lent for minutes only."""
    tell(f"{who} failed\n{''.join(traceback.format_exception(error, limit=-FRAMES)).rstrip()}")
    return described(error)


class Results:
    """The rows of a run and of earlier ones, by suite, in the file at `path`."""

    def __init__(self, path: Path, environment: Mapping[str, Any], rounds: int) -> None:
        self.path = path
        self.suites: dict[str, list[dict[str, Any]]] = {}
        self._content: dict[str, Any] = {
            "schema": SCHEMA, "environment": dict(environment), "rounds": rounds, "suites": self.suites,
        }  # fmt: skip
        self._here = where(environment)

    def take(self, folder: Path, suites: Collection[str]) -> list[str]:
        """Take the rows of `suites` from every file of benches in `folder` and below; what is to be said of them.

        Only those that were measured on a device of the same name, with the same torch, can stand beside ours. Of two
        rows of a name the complete one stays, and of two complete ones that of the newer file.
        """
        counts: Counter[str] = Counter()
        for path in sorted(folder.rglob("*.json"), key=lambda path: (path.stat().st_mtime, str(path))):
            found = _suites_of(path)
            for suite in suites:
                for row in found.get(suite, ()):
                    there = row.get(MEASURED_ON, {})
                    if any(there.get(what) != self._here[what] for what in ("device", "torch")):
                        device, version = there.get("device", "an unknown device"), there.get("torch", "unknown")
                        counts[f"of {device}, torch {version} are left aside"] += 1
                    elif (held := self._find(suite, row["name"])) is None or complete(row) or not complete(held):
                        self._put(suite, row)
        for row in (row for suite in suites for row in self.suites.get(suite, ())):
            if complete(row) and row[MEASURED_ON]["commit"] != self._here["commit"]:
                counts[f"were measured at commit {row[MEASURED_ON]['commit']} and are kept"] += 1
        return [f"{count} rows {what}" for what, count in counts.items()]

    def missing(self, suite: str) -> Missing:
        """What a suite still has to measure; rows that it begins are noted in the file until they are added."""
        rows = self.suites.get(suite, ())
        return Missing(
            frozenset(row["name"] for row in rows if complete(row)),
            frozenset(row["name"] for row in rows if row.get("error")),
            lambda name: self._write_with(suite, {"name": name, "error": BEGUN}),
        )

    def add(self, suite: str, row: AnyRow) -> None:
        """Put a row in the place of one of its name, and write."""
        self._write_with(suite, row.to_dict())

    def write(self) -> Path:
        """Write the file whole."""
        return write_json(self.path, self._content)

    def _write_with(self, suite: str, row: Mapping[str, Any]) -> None:
        self._put(suite, {**row, MEASURED_ON: self._here})
        self.write()

    def _put(self, suite: str, row: dict[str, Any]) -> None:
        rows = self.suites.setdefault(suite, [])
        held = self._find(suite, row["name"])
        if held is None:
            rows.append(row)
        else:
            rows[rows.index(held)] = row

    def _find(self, suite: str, name: str) -> dict[str, Any] | None:
        return next((row for row in self.suites.get(suite, ()) if row["name"] == name), None)


def where(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Of a machine what a row says of it: the device's name, torch's version, the commit."""
    device = environment.get("gpu") or environment.get("cpu")
    return {"device": device, "torch": environment.get("torch"), "commit": environment.get("commit")}


def _suites_of(path: Path) -> Mapping[str, list[dict[str, Any]]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        return {}
    suites: Mapping[str, list[dict[str, Any]]] = content["suites"]
    return suites
