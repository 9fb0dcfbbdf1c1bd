"""A report: a verdict, and sections of text, tables, charts and findings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import Any, Literal

from ..errors import kind_of
from .charts import BarChart, Chart, ExponentHistogram, HeatMap, LineChart
from .files import write_text
from .finding import Finding, count_severities
from .html import render
from .table import Table
from .values import paragraphs, plain_text, to_json

Status = Literal["good", "warning", "error", "neutral"]


Picture = Table | LineChart | ExponentHistogram | BarChart | HeatMap

Item = Picture | Finding


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with paragraphs (blank lines part them, `backticks` mark code) and the items below.

    Raises `TypeError` for an item that no report can show. The anchor is made from the title unless given.
    """

    title: str
    text: str = ""
    items: Sequence[Item] = ()
    anchor: str = ""

    def __post_init__(self) -> None:
        """Freeze and check the items, and make the anchor."""
        object.__setattr__(self, "items", tuple(self.items))
        for item in self.items:
            if not isinstance(item, Item):
                raise TypeError(
                    f"section {self.title!r} cannot show {kind_of(item)}; give a Table, a chart or a Finding"
                )
        anchor = re.sub(r"[^a-z0-9]+", "-", (self.anchor or self.title).lower()).strip("-")
        object.__setattr__(self, "anchor", anchor or "section")

    def to_text(self) -> str:
        """Heading, paragraphs and items, blank lines between."""
        title = " ".join(self.title.split())
        parts = [f"{title}\n{'-' * len(title)}", *paragraphs(self.text)]
        parts += [item.to_text() for item in self.items]
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Every field; an item has a "kind"."""
        return {
            "title": self.title,
            "anchor": self.anchor,
            "text": self.text,
            "items": [_item_dict(item) for item in self.items],
        }


RESERVED = ("main", "details", "what-to-do", "environment", "report-data")
"""Ids that the page itself has."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything one report shows, in reading order, and the raw data behind it.

    `verdict` is the one line to remember; `status` colours it and follows from the worst finding unless given.
    `headline` is a shorter one, for the page. `picture` shows the verdict, `advice` says what to do, in paragraphs, and
    `paste` is the command or code for it: these are the first screen. `environment` maps names to what ran; `data` is
    embedded in the HTML as JSON where it is not too large; `created` is an ISO time; `glossary` says what findings of
    a code mean, in paragraphs, beside them in the HTML.

    >>> losses = LineChart("Loss", "step", "loss", [Series("O4", [0, 1, 2], [2.3, 1.9, 1.6])])
    >>> Report("A run", "It learns.", [Section("Loss", "At O4.", [losses])]).write_html("run.html")
    """

    title: str
    verdict: str
    sections: Sequence[Section] = ()
    _: KW_ONLY
    summary: str = ""
    headline: str = ""
    picture: Picture | None = None
    advice: str = ""
    paste: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict, hash=False)
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    data: Mapping[str, Any] = field(default_factory=dict, hash=False)
    status: Status | None = None
    glossary: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Freeze the parts and tell sections of one name apart by number."""
        if self.status not in (None, "good", "warning", "error", "neutral"):
            raise ValueError(f"status must be good, warning, error or neutral; got {self.status!r}")
        taken = set(RESERVED)
        sections = []
        for section in self.sections:
            anchor, number = section.anchor, 2
            while anchor in taken:
                anchor, number = f"{section.anchor}-{number}", number + 1
            taken.add(anchor)
            sections.append(Section(section.title, section.text, section.items, anchor))
        object.__setattr__(self, "sections", tuple(sections))
        object.__setattr__(self, "environment", dict(self.environment))
        object.__setattr__(self, "data", dict(self.data))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of all sections, most harmful first."""
        items = (item for section in self.sections for item in section.items)
        return tuple(sorted(item for item in items if isinstance(item, Finding)))

    @property
    def mood(self) -> Status:
        """`status` if given, otherwise that of the worst finding; neutral without errors and warnings."""
        if self.status is not None:
            return self.status
        counts = count_severities(self.findings)
        return "error" if counts["error"] else "warning" if counts["warning"] else "neutral"

    def environment_rows(self) -> list[tuple[str, str]]:
        """The environment as (name, text) pairs."""
        return [(str(name), plain_text(value)) for name, value in self.environment.items()]

    def to_text(self) -> str:
        """The report for a terminal."""
        title = " ".join(self.title.split())
        parts = [f"{title}\n{'=' * len(title)}", self.verdict, *paragraphs(self.summary)]
        parts += [self.picture.to_text()] if self.picture is not None else []
        if self.advice or self.paste:
            parts += ["What to do\n----------", *paragraphs(self.advice), self.paste and indented(self.paste)]
        if self.environment:
            wide = max(len(name) for name in self.environment)
            parts.append("\n".join(f"{name:<{wide}}  {text}" for name, text in self.environment_rows()))
        parts += [section.to_text() for section in self.sections]
        return "\n\n".join(part for part in parts if part) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Every field, in types that strict JSON takes; "findings" repeats them by harm."""
        return {
            "title": self.title,
            "verdict": self.verdict,
            "status": self.mood,
            "summary": self.summary,
            "headline": self.headline,
            "picture": self.picture.to_dict() if self.picture is not None else None,
            "advice": self.advice,
            "paste": self.paste,
            "created": self.created,
            "environment": to_json(self.environment),
            "findings": [finding.to_dict() for finding in self.findings],
            "sections": [section.to_dict() for section in self.sections],
            "data": to_json(self.data),
        }

    def to_html(self) -> str:
        """The report as one HTML page that loads nothing."""
        return render(self)

    def _repr_html_(self) -> str:
        """The page in a frame of its own, as a notebook shows it."""
        return f'<iframe srcdoc="{escape(self.to_html())}" style="width: 100%; height: 40em; border: 0"></iframe>'

    def write_html(self, path: str | Path) -> Path:
        """Write `to_html()` to `path`, whole or not at all, and return the path. Missing folders are made."""
        return write_text(path, self.to_html())


def indented(text: str) -> str:
    """Text to paste, as a terminal shows it."""
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


def _item_dict(item: Item) -> dict[str, Any]:
    """An item's dict with its kind."""
    return {"kind": "finding", **item.to_dict()} if isinstance(item, Finding) else item.to_dict()


__all__ = ["Chart", "Item", "Picture", "Report", "Section", "Status"]
