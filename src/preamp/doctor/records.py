"""What a watched process records as it goes, and its sinks: a file for the doctor outside, or memory.

In a file a record is one line of JSON, there as soon as it is written: whatever ends the process, the report is made.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..errors import PreampWarning
from ..report import Finding, to_json

Line = tuple[str | None, int | None]
"""File and line number; None for both where no code of the user's was running."""
NOWHERE: Line = (None, None)


def shown_path(file: str | None, base: Path) -> str | None:
    """A file as a report has it: relative to the base where it lies below; a cell of a notebook has no path."""
    if file is None or file.startswith("<"):
        return file
    below = os.path.relpath(file, base)
    return os.path.abspath(file) if below.startswith("..") else below


class Sink(Protocol):
    """Takes records: "step", "finding", "telemetry", "audit", "overflow", ..., each with facts fit for JSON."""

    def write(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Take one record.

        Args:
            kind: "step", "finding", "telemetry", "audit", "overflow", ...
            facts: What there is to say of it: strings, finite numbers, lists and dicts.
        """


class Recorder:
    """Hands records on to sinks. A forked child records nothing; a sink that fails is left out from then on."""

    def __init__(self, *sinks: Sink, rank: int = 0) -> None:
        self.sinks = list(sinks)
        self._rank, self._pid = rank, os.getpid()
        self._begun = False

    @property
    def is_own(self) -> bool:
        """Whether this is the process that the recorder was made in."""
        return os.getpid() == self._pid

    def write(self, kind: str, **facts: Any) -> None:
        """One record; values are made fit for JSON."""
        if not self.is_own:
            return
        if not self._begun:
            self._begun = True
            self.write("process", rank=self._rank, pid=self._pid)
        record = to_json(facts)
        for sink in tuple(self.sinks):
            try:
                sink.write(kind, record)
            except Exception as error:
                self.sinks.remove(sink)
                name = type(sink).__name__
                warnings.warn(f"{name} failed and gets no more records: {error!r}", PreampWarning, stacklevel=2)


class JsonLines:
    """A sink: appends every record to a file as one line of JSON, with its "kind"; the file is made with the first.

    Args:
        path: The file, with its folders made if they are missing.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: int | None = None

    def write(self, kind: str, facts: Mapping[str, Any]) -> None:
        """One line, in the file when this returns."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        line = json.dumps({"kind": kind, **facts}, allow_nan=False)
        os.write(self._file, line.encode() + b"\n")


@dataclass(slots=True)
class Rank:
    """All that one process wrote."""

    rank: int
    findings: list[Finding] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """The last record of each other kind."""
    many: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """All records of each other kind."""

    @property
    def first_taken(self) -> int:
        """How many steps were skipped before the first one that was taken."""
        return next((index for index, step in enumerate(self.steps) if not step["skipped"]), len(self.steps))

    @property
    def scaler_at(self) -> Line:
        """Where the script made its last scaler."""
        file, line = self.facts.get("end", {}).get("scaler_at", NOWHERE)
        return file, line

    def write(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Take one record: this is a sink."""
        record = dict(facts)
        if kind == "process":
            self.rank = record["rank"]
        elif kind == "finding":
            self.findings.append(Finding(**record))
        elif kind == "step":
            self.steps.append(record)
        else:
            self.facts[kind] = record
            self.many.setdefault(kind, []).append(record)


def read_ranks(folder: Path) -> list[Rank]:
    """The processes that recorded anything, by rank; a line cut short by a kill is left out."""
    found = []
    for path in sorted(folder.glob("rank*.jsonl"), key=lambda p: p.stat().st_mtime):
        rank = Rank(0)
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                rank.write(record.pop("kind", ""), record)
        found.append(rank)
    return sorted(found, key=lambda one: (one.rank, -len(one.steps)))
