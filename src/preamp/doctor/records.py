"""What a watched process records as it goes, and its sinks: a file for the doctor outside, memory, TensorBoard.

In a file a record is one line of JSON, there as soon as it is written: whatever ends the process, the report is made.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..errors import PreampWarning, kind_of
from ..formats import FP16
from ..report import Finding, to_json
from .exponents import rows_of

Line = tuple[str | None, int | None]
"""File and line number; None for both where no code of the user's was running."""
NOWHERE: Line = (None, None)


def spell_line(at: Line) -> str | None:
    """A line as records have it: "train.py:7"."""
    return None if at[0] is None else f"{at[0]}:{at[1]}"


def parse_line(text: str | None) -> Line:
    """What `spell_line` made a text of."""
    file, _, line = (text or "").rpartition(":")
    return file or None, int(line) if line.isdigit() else None


def shown_path(file: str | None, base: Path) -> str | None:
    """A file as a report has it: relative to the base where it lies below; a cell of a notebook has no path."""
    if file is None or file.startswith("<"):
        return file
    below = os.path.relpath(file, base)
    return os.path.abspath(file) if below.startswith("..") else below


class Sink(Protocol):
    """Takes records: "step", "finding", "telemetry", "audit", "overflow", ..., each with facts fit for JSON."""

    def write(self, kind: str, facts: Mapping[str, Any]) -> None:
        """One record."""


class Recorder:
    """Hands records on to sinks. A forked child records nothing; a sink that fails is left out from then on."""

    def __init__(self, *sinks: Sink, rank: int = 0) -> None:
        self._sinks = list(sinks)
        self._rank, self._pid = rank, os.getpid()
        self._begun = False

    @property
    def is_own(self) -> bool:
        """Whether this is the process that the recorder was made in."""
        return os.getpid() == self._pid

    def add(self, sink: Sink) -> None:
        """Have another one listen from here on."""
        self._sinks.append(sink)

    def remove(self, sink: Sink) -> None:
        """Have it listen no more."""
        if sink in self._sinks:
            self._sinks.remove(sink)

    def write(self, kind: str, **facts: Any) -> None:
        """One record; values are made fit for JSON."""
        if not self.is_own:
            return
        if not self._begun:
            self._begun = True
            self.write("process", rank=self._rank, pid=self._pid)
        record = to_json(facts)
        for sink in tuple(self._sinks):
            try:
                sink.write(kind, record)
            except Exception as error:
                self.remove(sink)
                name = type(sink).__name__
                warnings.warn(f"{name} failed and gets no more records: {error!r}", PreampWarning, stacklevel=2)


class JsonLines:
    """A sink: appends every record to a file as one line of JSON, with its "kind"; the file is made with the first."""

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
        for record in _lines(path):
            rank.write(record.pop("kind", ""), record)
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


class TensorBoard:
    """A sink: loss, scale and skips as scalars, magnitudes as scalars and histograms, findings as text.

    `writer`: a `torch.utils.tensorboard.SummaryWriter`, or anything with its `add_scalar`, `add_histogram_raw` and
    `add_text`; it is not closed. Histograms are over powers of two: the bucket of exponent e is [2^e, 2^(e+1)), drawn
    at e, of magnitudes without the loss scale; zeros are left out.
    """

    def __init__(self, writer: Any, prefix: str = "preamp") -> None:
        for name in ("add_scalar", "add_histogram_raw", "add_text"):
            if not callable(getattr(writer, name, None)):
                raise TypeError(
                    f"TensorBoard() takes a torch.utils.tensorboard.SummaryWriter; {kind_of(writer)} has no {name}()"
                )
        self._writer, self._prefix = writer, prefix
        self._skips = 0

    def write(self, kind: str, facts: Mapping[str, Any]) -> None:
        """One record."""
        if kind == "step":
            self._step(facts)
        elif kind == "telemetry":
            self._telemetry(facts)
        elif kind == "finding":
            where = f"{facts['file']}:{facts['line']}" if facts["file"] else facts["module"] or ""
            text = f"**{facts['severity']} {facts['code']}** {facts['message']}\n\n{where}\n\n    {facts['fix'] or ''}"
            self._writer.add_text(f"{self._prefix}/findings", text, facts["step"] or 0)

    def _step(self, facts: Mapping[str, Any]) -> None:
        step = facts["step"]
        self._skips += bool(facts["skipped"])
        for name in ("loss", "scale"):
            if isinstance(facts[name], (int, float)):  # JSON spells infinity and NaN as words
                self._writer.add_scalar(f"{self._prefix}/{name}", facts[name], step)
        self._writer.add_scalar(f"{self._prefix}/skipped", self._skips, step)

    def _telemetry(self, facts: Mapping[str, Any]) -> None:
        step = facts["step"]
        for row in rows_of(facts):
            tag = f"{row.kind}/{row.module or '(root)'}"
            used, true = row.in_backward, row.true
            below, room = used.flushed(FP16) + used.subnormal(FP16), used.headroom(FP16)
            self._writer.add_scalar(f"{self._prefix}/below float16/{tag}", below, step)
            if room is not None:
                self._writer.add_scalar(f"{self._prefix}/headroom/{tag}", room, step)
            if true.counts:
                exponents = range(true.first, true.first + len(true.counts))
                total = sum(e * n for e, n in zip(exponents, true.counts, strict=True))
                squares = sum(e * e * n for e, n in zip(exponents, true.counts, strict=True))
                self._writer.add_histogram_raw(
                    f"{self._prefix}/exponents/{tag}", min=exponents[0], max=exponents[-1] + 1, num=sum(true.counts),
                    sum=total, sum_squares=squares, bucket_limits=[e + 1 for e in exponents],
                    bucket_counts=list(true.counts), global_step=step,
                )  # fmt: skip
