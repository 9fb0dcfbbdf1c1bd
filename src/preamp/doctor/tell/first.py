"""The first screen of the doctor's report: the picture that shows the worst finding, and what to do about it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from ...report import BarChart, Finding, HeatMap, LineChart, Marker, Series, Span
from ..findings.check import counted
from ..records import Rank
from .magnitudes import heat_maps, lost_gradients

MARKS = 40
"""So many skips, or rows of them, are marked at most: the longest."""

IN_SCALE = frozenset({"PA201", "PA203", "PA207"})
"""What the loss scale shows best: a bad step is skipped, and the scale falls."""

BELOW = frozenset({"PA107", "PA111", "PA202", "PA204"})
"""What is lost below float16's normal range, or below the bits of a weight."""

BEYOND = frozenset({"PA103", "PA205"})
"""What comes near the end of the range."""


def headline_of(findings: Sequence[Finding]) -> str:
    """The worst finding as a sentence; "" where there is none to worry about."""
    if not findings or findings[0].severity == "info":
        return ""
    worst = findings[0]
    name = re.search(r"[._]", worst.message.split(" ")[0])  # of an operator or a function: aten.bmm, clip_grad_norm_
    message = worst.message if name else worst.message[:1].upper() + worst.message[1:]
    return f"{message} ({worst.code}{_place(worst, '')})."


def loss_chart(rank: Rank, worst: Finding | None = None) -> LineChart:
    """The loss of every attempt to step; skipped ones are marked, and the step of the worst finding."""
    x = [step["step"] for step in rank.steps]
    loss = Series("loss", x, [_number(step["loss"]) for step in rank.steps])
    marks, spans = _skips(rank)
    if worst is not None and worst.step is not None and not any(mark.x == worst.step for mark in marks):
        marks.append(Marker(float(worst.step), None, worst.code))
    return LineChart("Loss", "step", "loss", (loss,), markers=marks, spans=spans)


def scale_chart(rank: Rank) -> LineChart | None:
    """The loss scale, if there is one."""
    if not any(step["scale"] for step in rank.steps):
        return None
    x = [step["step"] for step in rank.steps]
    scale = Series("scale", x, [_number(step["scale"]) for step in rank.steps], steps=True)
    marks, spans = _skips(rank)
    return LineChart("Loss scale", "step", "scale", (scale,), y_log2=True, markers=marks, spans=spans)


def picture(rank: Rank, worst: Finding | None) -> LineChart | BarChart | HeatMap:
    """What shows the worst finding; the loss where nothing shows it better."""
    code = worst.code if worst is not None else ""
    if code in IN_SCALE and any(step["skipped"] for step in rank.steps):
        return scale_chart(rank) or loss_chart(rank, worst)
    if code == "PA202" and (lost := lost_gradients(rank.facts.get("underflow"))) is not None:
        return lost
    maps = heat_maps(rank) if code in BELOW | BEYOND else None
    if maps is None:
        return loss_chart(rank, worst)
    return maps[0] if code in BELOW else maps[1]


def advice(findings: Sequence[Finding], command: Sequence[str], stepped: bool) -> tuple[str, str]:
    """What to do, in words, and what to paste for it."""
    script = shlex.join(command)
    serious = [finding for finding in findings if finding.severity != "info"]
    if serious:
        worst = serious[0]
        others = f" {counted(serious[1:])} more {'is' if len(serious) == 2 else 'are'} below." if serious[1:] else ""
        cure = f"Begin with `{worst.code}`{_place(worst, '`')}, then run `preamp doctor` again.{others}"
        return cure, worst.fix or f"preamp explain {worst.code}"
    if not stepped:
        return "Give the doctor a script that trains: it watches the steps of an optimizer.", ""
    return "Nothing has to change. Whether 16 bits cost quality, only a comparison with full precision shows:", (
        f"preamp compare {script}"
    )


def _place(finding: Finding, mark: str) -> str:
    """Module and line, as far as they are known."""
    told = not mark and finding.module in re.split(r"[\s'\"]+", finding.message)
    module = f" in {mark}{finding.module}{mark}" if finding.module and not told else ""
    return module + (f" at {mark}{finding.file}:{finding.line}{mark}" if finding.file and finding.line else "")


def _skips(rank: Rank) -> tuple[list[Marker], list[Span]]:
    """A rule for each step that was skipped, and a shade for several in a row; the first, and the longest, say so."""
    rows: list[list[float]] = []
    for at in (float(step["step"]) for step in rank.steps if step["skipped"]):
        if rows and at == rows[-1][-1] + 1:
            rows[-1].append(at)
        else:
            rows.append([at])
    rows = sorted(sorted(rows, key=len, reverse=True)[:MARKS])
    longest = max(rows, key=len, default=None)
    alone, several = ([row for row in rows if (len(row) > 1) is many] for many in (False, True))
    marks = [Marker(row[0], None, "skipped" if row is alone[0] else "") for row in alone]
    words = {id(longest): f"{len(longest)} steps skipped in a row" if longest else ""}
    return marks, [Span("x", row[0], row[-1] + 1, words.get(id(row), "")) for row in several]


def _number(value: object) -> float | None:
    return value if isinstance(value, (int, float)) else None
