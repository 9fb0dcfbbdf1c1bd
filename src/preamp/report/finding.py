"""A finding: one thing the doctor reports, with a stable code, a place and a fix."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .values import Fields, plain_text

Severity = Literal["error", "warning", "info"]
Direction = Literal["forward", "backward"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""From most to least harmful."""

_CODE = re.compile(r"PA\d{3}\Z", re.ASCII)


APART = ("carried by", "tried")
"""Evidence that has a line of its own in a text: no observation of the place."""
LISTED = 8
"""Parts of a list that are shown; JSON has them all."""


@dataclass(frozen=True, slots=True)
class Finding(Fields):
    """One thing found: what, how harmful, where, what was seen, and what to write instead.

    `step` counts optimizer-step attempts from 0; `module` is a path of `named_modules()` (the root is "");
    `evidence` is a sentence or a mapping of names to what was measured; `fix` is text to paste.
    Findings sort by harm: errors first, then by step, code and place. Raises `ValueError` for a code that is not
    PA and three digits, or an unknown severity or direction.
    """

    code: str
    severity: Severity
    message: str
    module: str | None = None
    op: str | None = None
    direction: Direction | None = None
    file: str | None = None
    line: int | None = None
    step: int | None = None
    evidence: str | Mapping[str, Any] | None = field(default=None, hash=False)
    fix: str | None = None

    def __post_init__(self) -> None:
        """Refuse what could not be looked up later."""
        if not _CODE.match(self.code):
            raise ValueError(f"a finding's code is PA and three digits, as in PA201; got {self.code!r}")
        if self.severity not in SEVERITIES:
            raise ValueError(f"severity of {self.code} must be one of {SEVERITIES}; got {self.severity!r}")
        if self.direction not in (None, "forward", "backward"):
            raise ValueError(f"direction of {self.code} must be 'forward' or 'backward'; got {self.direction!r}")
        if isinstance(self.evidence, Mapping):
            object.__setattr__(self, "evidence", dict(self.evidence))

    def __lt__(self, other: Finding) -> bool:
        return self._harm() < other._harm()

    def _harm(self) -> tuple[int, float, str, str, str, int, str]:
        """Sort key: smaller is more harmful."""
        step = math.inf if self.step is None else self.step
        place = (self.module or "", self.file or "", self.line or 0)
        return (SEVERITIES.index(self.severity), step, self.code, *place, self.message)

    @property
    def where(self) -> tuple[tuple[str, str], ...]:
        """The place as (name, text) pairs, only those that are known."""
        source = self.file if self.line is None or self.file is None else f"{self.file}:{self.line}"
        if self.file is None and self.line is not None:
            source = f"line {self.line}"
        module = "(root)" if self.module == "" else self.module
        step = None if self.step is None else str(self.step)
        pairs = (("source", source), ("module", module), ("op", self.op), ("direction", self.direction), ("step", step))
        return tuple((name, text) for name, text in pairs if text is not None)

    @property
    def seen(self) -> tuple[tuple[str, str], ...]:
        """The evidence as (name, text) pairs, of a long list the first parts; a sentence has the name ""."""
        if self.evidence is None:
            return ()
        if isinstance(self.evidence, str):
            return (("", self.evidence),)
        return tuple((str(name), plain_text(_first(value))) for name, value in self.evidence.items())

    def to_text(self) -> str:
        """Plain lines for a terminal; the first has severity, code and message."""
        lines = [f"{self.severity} {self.code}: {self.message}"]
        if self.where:
            lines.append("  where: " + ", ".join(f"{name} {text}" for name, text in self.where))
        seen = ", ".join(f"{name} {text}".strip() for name, text in self.seen if name not in APART)
        lines += [f"  seen:  {seen}"] if seen else []
        lines += [f"  {name}: {text}" for name, text in self.seen if name in APART and text not in (self.fix or "")]
        if self.fix:
            lines.append("  fix:")
            lines.extend(f"    {line}".rstrip() for line in self.fix.splitlines())
        return "\n".join(lines)


def count_severities(findings: Iterable[Finding]) -> dict[Severity, int]:
    """How many findings there are of each severity, zeros included, most harmful first."""
    counts = dict.fromkeys(SEVERITIES, 0)
    for finding in findings:
        counts[finding.severity] += 1
    return counts


def _first(value: Any) -> Any:
    """A long list as its first parts, and how many more there are."""
    if not isinstance(value, (list, tuple)) or len(value) <= LISTED:
        return value
    return [*value[: LISTED - 1], f"and {len(value) - LISTED + 1} more"]
