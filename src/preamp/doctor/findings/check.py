"""What all findings are made by: a check takes events of the kinds it has a method for, and says what it found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from ...report import Finding, count_severities
from ...report.finding import Severity
from ..records import NOWHERE, Line, Rank
from ..shadow.facts import Fact
from .events import Deviated, Raised

BY_SESSION = (
    "session.backward(loss)  # in place of loss.backward()\n"
    "session.step()  # in place of optimizer.step(); or session.step(optimizer)"
)
"""What a loop says once a session is prepared."""
Listener = Callable[[Any], Iterable[Finding]]


def on(kind: type) -> Callable[[Any], Any]:
    """Mark a method of a check as the one that takes events of this kind."""

    def mark(method: Any) -> Any:
        method.takes = kind
        return method

    return mark


class Check:
    """Judges one code, its class's name. A method marked by `on` takes an event and gives findings."""

    errors: ClassVar[tuple[tuple[str, str, str], ...]] = ()
    """Errors of torch's or preamp's that are this finding: a part of their text, the message, and the fix."""
    untried: ClassVar[str] = "# call .float() on what this line computes with"
    """Advice on a fact of this code where nothing was tried."""

    @classmethod
    def finding(
        cls, severity: Severity, message: str, fix: str | None = None, *, at: Line = NOWHERE, **facts: Any
    ) -> Finding:
        """A finding of this code; `at`: file and line; `facts`: other fields of `Finding`."""
        return Finding(cls.__name__, severity, message, file=at[0], line=at[1], fix=fix, **facts)

    def listeners(self) -> Iterator[tuple[type, Listener]]:
        """Kinds of events, and the methods that take them."""
        for name in dir(self):
            kind = getattr(getattr(self, name), "takes", None)
            if kind is not None and (kind is not Raised or self.errors):
                yield kind, getattr(self, name)

    @on(Deviated)
    def deviated(self, event: Deviated) -> Iterator[Finding]:
        """A fact of this code, if facts have it."""
        if event.fact.code == type(self).__name__:
            severity, message = self.told(event.fact)
            fix = event.fix if event.tried else self.untried
            yield self.finding(severity, message, fix, **event.where, evidence=event.evidence)

    def told(self, fact: Fact) -> tuple[Severity, str]:
        """Severity and message of a fact of this code."""
        raise NotImplementedError

    @on(Raised)
    def raised(self, event: Raised) -> Iterator[Finding]:
        """An error that stands for this finding."""
        for part, message, fix in self.errors:
            if part in event.text:
                evidence = event.text.splitlines()[0][:300]
                message = f"{message} ({event.kind})"
                yield self.finding("error", message, fix, at=event.at, module=event.module, evidence=evidence)

    def at_end(self, rank: Rank) -> Iterable[Finding]:
        """What only a whole run shows, from all that one process recorded of its steps."""
        return ()

    def among(self, ranks: Sequence[Rank]) -> Iterable[Finding]:
        """What shows where processes are laid side by side."""
        return ()


class Listeners:
    """Hands each event to the checks that take its kind, and their findings on."""

    def __init__(self, checks: Iterable[Check], report: Callable[[Finding], None]) -> None:
        self._report = report
        self._by_kind: dict[type, list[Listener]] = defaultdict(list)
        for check in checks:
            for kind, listener in check.listeners():
                self._by_kind[kind].append(listener)

    def __call__(self, event: object) -> None:
        """Something happened."""
        for listener in self._by_kind.get(type(event), ()):
            for finding in listener(event):
                self._report(finding)


def without_repeats(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Most harmful first; a line that runs in a loop, or a constant met twice there, is reported once."""
    kept: dict[tuple[Any, ...], Finding] = {}
    for each in sorted(findings):
        place = (each.file, each.line) if each.line is not None else (each.message,)
        kept.setdefault((each.code, each.module, each.op, *place), each)
    return tuple(kept.values())


def with_evidence(finding: Finding, **evidence: Any) -> Finding:
    """The same with more evidence."""
    seen = finding.evidence
    before = {} if seen is None else seen if isinstance(seen, dict) else {"seen": seen}
    return replace(finding, evidence={**before, **evidence})


def counted(findings: Iterable[Finding]) -> str:
    """How many there are of each severity: "2 errors, 1 warning"; "" without any."""
    counts = count_severities(findings)
    return ", ".join(f"{n} {kind}{'s' if n > 1 and kind != 'info' else ''}" for kind, n in counts.items() if n)
