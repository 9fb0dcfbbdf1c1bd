"""Rows are measured one by one, and each is in the file as soon as it is known; a file is gone on with."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from preamp.errors import PreampError
from preamp.machine import seconds_now
from preamp.report import to_json
from preamp.report.files import write_json
from preamp.report.values import format_left

from .report import table

SCHEMA = "preamp-bench/1"
BEGUN = "begun, and the process ended before it was measured"
"""The error of a row that a crash or a kill broke off."""
MEASURED_ON = "measured on"  # the key under which a row says where: device, torch, commit
LOST = 75  # exit status of a process whose device answers no more, as after an illegal access to its memory


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where rows are measured and how long; `tiny`: in a size that shows only that they can be."""

    device: torch.device
    rounds: int = 15
    tiny: bool = False
    tell: Callable[[str], None] = lambda what: print(what, flush=True)

    def failed(self, who: str, error: BaseException) -> str:
        """The error in a line; its traceback is told at once, as a device may be lent for minutes only."""
        self.tell(f"{who} failed\n{''.join(traceback.format_exception(error, limit=-12)).rstrip()}")
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        return f"{type(error).__name__}: {first.strip()}"[:300]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A work and what is measured of its contenders, in `seconds` on an H100 by estimate, compiling included.

    `measure` gives the row's contents: under "contenders" a mapping each, the reference first, with `name` and either
    `error` or what was measured, times in seconds and memory in bytes; "not measured" says why there are none.
    """

    suite: str
    name: str
    what: str
    measure: Callable[[Setting], dict[str, Any]]
    seconds: float


def complete(row: dict[str, Any]) -> bool:
    """Whether a row, as JSON has it, lacks nothing that another run could measure."""
    contenders = row.get("contenders")
    return not row.get("error") and (not contenders or not all(each.get("error") for each in contenders))


class Results:
    """The rows of a file, by suite and name; those that it has already were measured on this device and torch."""

    def __init__(self, path: Path, environment: dict[str, Any], rounds: int) -> None:
        self.path = path
        self.suites: dict[str, dict[str, dict[str, Any]]] = {}
        self._about = {"schema": SCHEMA, "environment": environment, "rounds": rounds}
        device = environment.get("gpu") or environment.get("cpu")
        self._here = {"device": device, "torch": environment.get("torch"), "commit": environment.get("commit")}
        if path.exists():
            suites = json.loads(path.read_text(encoding="utf-8"))["suites"]
            self.suites = {name: {row["name"]: row for row in rows} for name, rows in suites.items()}
        for there in (row[MEASURED_ON] for rows in self.suites.values() for row in rows.values()):
            if any(there[what] != self._here[what] for what in ("device", "torch")):
                raise PreampError(
                    f"{path} was measured on {there['device']} with torch {there['torch']}, and this is {device} with "
                    f"torch {self._here['torch']}, whose figures belong in another file: write --out FOLDER"
                )

    def find(self, row: Row) -> dict[str, Any] | None:
        """What there is of a row."""
        return self.suites.get(row.suite, {}).get(row.name)

    def put(self, row: Row, found: dict[str, Any]) -> None:
        """Put what was found of a row in the place of what there is of it, and write the file, whole or not at all."""
        told = {"name": row.name, "what": row.what, **found, MEASURED_ON: self._here}
        self.suites.setdefault(row.suite, {})[row.name] = to_json(told)
        write_json(self.path, self.content)

    @property
    def content(self) -> dict[str, Any]:
        """As the file has it."""
        return {**self._about, "suites": {name: [*rows.values()] for name, rows in self.suites.items()}}


def run(
    rows: Sequence[Row], results: Results, setting: Setting, *, seconds: float = math.inf, again: bool = False,
    now: Callable[[], float] = time.monotonic,
) -> list[Row]:  # fmt: skip
    """Measure the rows that `results` lacks, and then those that failed, or `again` all; the rows that are left over.

    No row begins when it takes longer, by its estimate, than what is left of `seconds`. A device that is lost ends the
    process with `LOST`, after the row.
    """
    began, left = now(), []
    todo = [row for row in rows if again or (held := results.find(row)) is None or not complete(held)]
    if not todo:
        setting.tell(f"{results.path} has all of it; --again measures anew")
    for place, row in enumerate(sorted(todo, key=lambda row: results.find(row) is not None)):
        started = now()
        if not setting.tiny and row.seconds > seconds - (started - began):
            left.append(row)
            continue
        still = f", {format_left((started - began) / place * (len(todo) - place))}" if place else ""
        setting.tell(f"{row.suite}: {row.name} ({place + 1} of {len(todo)}{still})")
        results.put(row, {"error": BEGUN})
        try:
            found = row.measure(setting)
        except Exception as error:
            found = {"error": setting.failed(row.name, error)}
        errors = [why for each in (found, *found.get("contenders", ())) if (why := each.get("error"))]
        if lost := bool(errors) and not _answers(setting.device):
            found["error"] = f"{errors[0]}; since then the device fails at whatever it is asked"
        results.put(row, {**found, "tiny": setting.tiny, "took": round(now() - started, 2)})
        setting.tell(table(row.name, [{"name": row.name, **found}]).to_text())
        if lost:
            raise SystemExit(LOST)
    return left


def _answers(device: torch.device) -> bool:
    try:
        return bool(seconds_now(device))
    except RuntimeError:
        return False
