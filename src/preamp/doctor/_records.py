"""What a watched process writes down as it goes, so that whatever ends it, the report can be made from outside.

One line of JSON a record, in one file a process; each is in the file as soon as it is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..report import Finding, to_json


class Recorder:
    """Appends records to a file that is made with the first of them. A forked child writes nothing."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank{rank}-{os.getpid()}.jsonl"
        self._rank = rank
        self._pid = os.getpid()
        self._file: int | None = None

    @property
    def is_own(self) -> bool:
        """Whether this is the process that the recorder was made in."""
        return os.getpid() == self._pid

    def write(self, kind: str, **facts: Any) -> None:
        """One record; values are made fit for JSON."""
        if not self.is_own:
            return
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self.write("process", rank=self._rank, pid=self._pid)
        line = json.dumps({"kind": kind, **to_json(facts)}, allow_nan=False)
        os.write(self._file, line.encode() + b"\n")

    def finding(self, finding: Finding) -> None:
        """A finding, as a record."""
        self.write("finding", **finding.to_dict())


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


def read_ranks(folder: Path) -> list[Rank]:
    """The processes that recorded anything, by rank; a line cut short by a kill is left out."""
    found = []
    for path in sorted(folder.glob("rank*.jsonl"), key=lambda p: p.stat().st_mtime):
        rank = Rank(0)
        for record in _lines(path):
            kind = record.pop("kind", "")
            if kind == "process":
                rank.rank = record["rank"]
            elif kind == "finding":
                rank.findings.append(Finding(**record))
            elif kind == "step":
                rank.steps.append(record)
            else:
                rank.facts[kind] = record
                rank.many.setdefault(kind, []).append(record)
        found.append(rank)
    return sorted(found, key=lambda one: (one.rank, -len(one.steps)))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record
