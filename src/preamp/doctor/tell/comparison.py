"""What a comparison of mixed with full precision shows."""

from __future__ import annotations

import math
import platform
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ... import __version__
from ...report import Cell, LineChart, Marker, Report, Section, Series, Snippet, Status, Table, format_number, to_json
from ..findings import glossary
from ..findings.pa206 import PA206, Error, Pair, Parity, Printed, culprit_of, parity, spell
from ..records import Rank

SHOWN = 20
"""Modules and parameters in the tables of errors, those with the largest ones."""

PRINTED = 5
"""Printed numbers of which a finding is made."""
ROUNDING = 2.0**-23
"""Below this share of the largest norm, what float32 computed is its own rounding."""


@dataclass(slots=True)
class Ran:
    """One run of the script."""

    name: str
    full: bool
    offset: int
    status: int
    seconds: float
    losses: list[float]
    skipped: int
    metrics: dict[str, float] = field(default_factory=dict)
    """The last number that the script printed under each name."""
    first_step: Path | None = None
    stderr: str = ""
    """Its end."""

    def to_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        return {
            "name": self.name,
            "full": self.full,
            "seed_offset": self.offset,
            "exit_code": self.status,
            "seconds": round(self.seconds, 2),
            **{name: getattr(self, name) for name in ("losses", "skipped", "metrics")},
        }


def losses_of(rank: Rank) -> list[float]:
    """The loss of every attempt to step; what JSON cannot spell is NaN."""
    losses = (step["loss"] for step in rank.steps)
    return [float(loss) if isinstance(loss, (int, float)) else math.nan for loss in losses]


def pairs_of(runs: Sequence[Ran]) -> list[Pair]:
    """The runs of each seed that both have steps."""
    full = {ran.offset: ran for ran in runs if ran.full and ran.losses}
    mixed = [ran for ran in runs if not ran.full and ran.offset in full and ran.losses]
    return [Pair(ran.losses, full[ran.offset].losses) for ran in mixed]


Errors = tuple[Error, ...]


def first_errors(runs: Sequence[Ran]) -> tuple[Errors, Errors]:
    """How far the first steps of the first seed are apart: what modules gave, in order, and gradients by parameter.

    Tensors that only one run has, or with another number of values, are left out.
    """
    kept = {ran.full: ran.first_step for ran in runs if ran.offset == 0 and ran.first_step is not None}
    if len(kept) < 2 or not all(path.exists() for path in kept.values()):
        return (), ()
    with np.load(kept[False]) as mixed, np.load(kept[True]) as full:
        return tuple(_errors(mixed, full, "output")), tuple(_errors(mixed, full, "gradient"))


@np.errstate(all="ignore")
def _errors(mixed: Mapping[str, Any], full: Mapping[str, Any], part: str) -> list[Error]:
    found = []
    for key in full:
        if not key.startswith(f"{part}:") or key not in mixed or mixed[key].shape != full[key].shape:
            continue
        a, b = mixed[key].astype(np.float64), full[key].astype(np.float64)
        norm, difference = float(np.linalg.norm(b)), float(np.linalg.norm(a - b))
        relative = difference / norm if norm and difference == difference else math.inf
        both = float(np.linalg.norm(a)) * norm
        cosine = float(a @ b) / both if 0 < both < math.inf else 0.0
        there = b != 0
        lost = float(((a == 0) & there).sum()) / max(int(there.sum()), 1)
        found.append(Error(key.partition(":")[2], 0.0 if difference == 0 else relative, cosine, norm, lost))
    return found


def build_comparison(runs: Sequence[Ran], margin: float | None, command: list[str]) -> tuple[Report, dict[str, Any]]:
    """The report as a page, and as the content of `compare.json`."""
    pairs, (outputs, gradients) = pairs_of(runs), first_errors(runs)
    found, culprit = parity(pairs, margin), culprit_of(outputs)
    differing = [one for one in printed(runs) if one.differs]
    line, findings = f"{failures(runs)}{verdict(found, len(pairs))}", PA206().of(found, culprit, differing[:PRINTED])
    line += "".join(f" But {one}." for one in differing[:1])
    environment = {
        "command": " ".join(command),
        "pairs": len(pairs),
        "steps": max((len(ran.losses) for ran in runs), default=0),
        "seconds": round(sum(ran.seconds for ran in runs), 1),
        "torch": version("torch"),
        "processor": platform.processor() or platform.machine(),
        "preamp": __version__,
    }
    sections = [Section("Result", "", (*findings, _results(runs, found)))]
    metrics = _metrics(runs)
    if metrics is not None:
        sections.append(
            Section("What the script printed", "The last number under each name, over the seeds.", (metrics,))
        )
    if outputs or gradients:
        sections.append(_first_step(outputs, gradients, culprit))
    status: Status | None = "good" if found.verdict == "equivalent" else "neutral"
    if any(finding.severity != "info" for finding in findings):
        status = None
    elif failures(runs):
        status = "warning"
    content: dict[str, Any] = to_json(
        {
            "schema": "preamp-compare/1",
            "verdict": line,
            "result": found.verdict,
            **{name: getattr(found, name) for name in ("difference", "interval", "margin", "parted")},
            "findings": [finding.to_dict() for finding in findings],
            "runs": [ran.to_dict() for ran in runs],
            "outputs": [asdict(error) for error in outputs],
            "gradients": [asdict(error) for error in gradients],
            "environment": environment,
        }
    )
    title, meanings = f"Compare: {Path(command[0]).name}", glossary(finding.code for finding in findings)
    words, paste = advice(found, culprit, command)
    if failures(runs):
        words, paste = "Mend what ended these runs, then compare again:", f"preamp compare {shlex.join(command)}"
    report = Report(
        title, line, sections, picture=_losses(runs, found), advice=words, paste=paste, environment=environment,
        status=status, data=content, glossary=meanings,
    )  # fmt: skip
    return report, content


def with_comparison(report: Report, content: dict[str, Any], runs: Sequence[Ran]) -> tuple[Report, dict[str, Any]]:
    """The doctor's report with what a comparison adds to it."""
    found, more = build_comparison(runs, None, [report.title])
    first, *rest = report.sections
    items = tuple(sorted((*report.findings, *found.findings)))
    tables = [item for item in found.sections[0].items if isinstance(item, Table)]
    against = Section("Against full precision", found.verdict, tables)
    loss = Section("Loss against full precision", "", () if found.picture is None else (found.picture,))
    sections = (replace(first, items=items), against, loss, *found.sections[1:], *rest)
    merged = replace(report, sections=sections, verdict=f"{report.verdict} {found.verdict}")
    merged = replace(merged, headline=f"{report.headline} {found.verdict}" if report.headline else "")
    merged = replace(merged, glossary={**report.glossary, **found.glossary})
    if any(finding.severity != "info" for finding in found.findings):
        merged = replace(merged, status=None)
    kept = {name: value for name, value in more.items() if name not in ("schema", "environment", "findings")}
    findings = to_json([finding.to_dict() for finding in items])
    content = {**content, "verdict": merged.verdict, "findings": findings, "comparison": kept}
    return replace(merged, data=content), content


def failures(runs: Sequence[Ran]) -> str:
    """A sentence on the runs that did not come to their end, with a space after it; "" without any."""
    failed = [ran for ran in runs if ran.status]
    if not failed:
        return ""
    ran = failed[0]
    why = "".join(f": {line.strip()}" for line in ran.stderr.strip().splitlines()[-1:])
    how = f"{ran.name} ended with status {ran.status} after {len(ran.losses)} steps{why}"
    return (
        f"{len(failed)} of {len(runs)} runs failed, and only steps that both runs of a pair made are compared ({how}). "
    )


def verdict(found: Parity, pairs: int) -> str:
    """The one line to remember."""
    over = f"over {pairs} seed{'s' if pairs > 1 else ''}"
    if found.verdict == "identical":
        return f"Both runs have the same losses, bit for bit, {over}: nothing in this script runs in mixed precision."
    if not all(map(math.isfinite, found.full)):
        return "Full precision itself does not end with a finite loss: this is no question of 16 bits."
    if found.verdict == "worse" and math.isinf(found.difference):
        return f"Mixed precision does not end with a finite loss, and full precision does, {over}."
    way = "above" if found.difference >= 0 else "below"
    told = f"mixed precision ends {format_number(abs(found.difference), 3)} {way} full precision {over}"
    if found.interval is not None:
        low, high = (f"{v:.2g}" for v in found.interval)
        told += f" (90 % interval {low} to {high}, margin {format_number(found.margin, 3)})"
    words = {"equivalent": "Equivalent: ", "worse": "Worse: ", "better": "Lower loss: ", "undecided": "Undecided: "}
    more = "; more seeds would tell" if found.verdict == "undecided" else ""
    return f"{words[found.verdict]}{told}{more}."


def advice(found: Parity, culprit: Error | None, command: Sequence[str]) -> tuple[str, str]:
    """What to do, in words, and what to paste for it."""
    script = shlex.join(command)
    if found.verdict == "identical":
        return "Ask the doctor why 16 bits are not in effect:", f"preamp doctor {script}"
    if not all(map(math.isfinite, found.full)):
        return "Mend the training in float32 first; the doctor names the operator that makes the first inf or nan:", (
            f"preamp doctor {script}"
        )
    if found.verdict == "undecided":
        return "Compare again with more seeds, or say with `--margin` which share of the loss does not matter:", (
            f"preamp compare --seeds {max(6, 2 * len(found.full))} {script}"
        )
    if found.verdict == "worse":
        if culprit is not None and culprit.name:
            return f"Keep `{culprit.name}`, the first module that gives something else, in full precision:", (
                f'preamp.prepare(model, optimizer, policy="O4; {culprit.name} -> full")'
            )
        return "Ask the doctor what 16 bits lose:", f"preamp doctor {script}"
    return "Keep training in 16 bits: over these seeds it costs nothing. The doctor watches longer runs:", (
        f"preamp doctor {script}"
    )


def _results(runs: Sequence[Ran], found: Parity) -> Table:
    full = {ran.offset: ran for ran in runs if ran.full}
    mixed = [ran for ran in runs if not ran.full and ran.offset in full]
    rows = [
        (f"+{ran.offset}", spell(a), spell(b), spell(a - b), ran.skipped, len(ran.losses))
        for ran, a, b in zip(mixed, found.mixed, found.full, strict=False)
    ]
    notes = ("the loss is the mean of a run's last tenth of steps; a seed is the script's own plus the offset",)
    return Table("Final loss", ("seed", "mixed", "full", "difference", "skipped", "steps"), rows, notes=notes)


def _losses(runs: Sequence[Ran], found: Parity) -> LineChart:
    series = []
    for name, full in (("mixed precision", False), ("full precision", True)):
        many = [ran.losses for ran in runs if ran.full is full]
        steps = range(max(map(len, many), default=0))
        at = [[one[step] for one in many if step < len(one) and math.isfinite(one[step])] for step in steps]
        means = [statistics.fmean(values) if values else None for values in at]
        lows, highs = [min(values, default=None) for values in at], [max(values, default=None) for values in at]
        series.append(Series(name, steps, means, lows, highs, dashed=full))
    marks = () if found.parted is None else (Marker(float(found.parted), None, "apart from here"),)
    note = "Lines are means over the seeds, bands reach from the lowest to the highest."
    return LineChart("Loss", "step", "loss", series, markers=marks, note=note, against="full precision")


def printed(runs: Sequence[Ran]) -> list[Printed]:
    """The numbers that all runs printed, and that are no settings."""
    full = {ran.offset: ran for ran in runs if ran.full}
    pairs = [(ran, full[ran.offset]) for ran in runs if not ran.full and ran.offset in full]
    found = []
    for name in runs[0].metrics if pairs else ():
        if all(name in ran.metrics for pair in pairs for ran in pair):
            mixed, other = (tuple(pair[side].metrics[name] for pair in pairs) for side in (0, 1))
            if len({*mixed, *other}) > 1:
                found.append(Printed(name, mixed, other))
    return found


def _metrics(runs: Sequence[Ran]) -> Table | None:
    rows = [(one.name, _span(one.mixed), _span(one.full)) for one in printed(runs)]
    return Table("Printed numbers", ("name", "mixed", "full"), rows) if rows else None


def _span(values: Sequence[float]) -> str:
    low, high = spell(min(values)), spell(max(values))
    return low if low == high else f"{low} to {high}"


def _first_step(outputs: Errors, gradients: Errors, culprit: Error | None) -> Section:
    text = (
        "Both runs begin with the same weights and the same batch, so their first step is one function in two "
        "precisions. A rounding to 16 bits is off by a percent at most; a relative error near 1, or a direction "
        "(cosine) far from 1, is another function. Dropout may draw other masks in other dtypes, which adds to it."
    )
    items: list[Any] = []
    for title, name, many in (
        ("What modules gave, mixed against full", "module", outputs),
        ("Gradients, mixed against full", "parameter", gradients),
    ):
        if many:
            items.append(errors_table(title, name, many))
    if culprit is not None and culprit.name:
        line = f'preamp.prepare(model, optimizer, policy="O4; {culprit.name} -> full")'
        items.append(Snippet("The first module that gives something else; in full precision:", line))
    return Section("The first step", text, items)


def errors_table(title: str, name: str, many: Errors) -> Table:
    """The largest relative errors, in the model's order; what is rounding in both precisions has none."""
    least = ROUNDING * max((error.norm for error in many if math.isfinite(error.norm)), default=0.0)
    relative = {e.name: None if e.norm < least and math.isfinite(e.relative) else e.relative for e in many}
    worst = sorted(many, key=lambda e: -(relative[e.name] or 0.0))[:SHOWN]
    rows: list[tuple[Cell, ...]] = []
    for error in (each for each in many if each in worst):
        found = relative[error.name]
        told = found if found is None else "inf" if math.isinf(found) else f"{found:.2%}"
        rows.append((error.name or "(root)", told, f"{error.cosine:.5f}", f"{error.lost:.2%}"))
    note = "Without a relative error: what is zero but for float32's rounding, as the gradient of a key's bias is."
    notes = (note,) if any(row[1] is None for row in rows) else ()
    return Table(title, (name, "relative error (L2)", "cosine", "lost to zero"), rows, notes=notes)
