"""What a comparison of mixed with full precision shows."""

from __future__ import annotations

import math
import platform
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ... import __version__
from ...report import Finding, LineChart, Marker, Report, Section, Series, Status, Table, format_number, to_json
from ..findings import glossary
from ..findings.pa206 import LEAST, PA206, SPREADS, Pair, Parity, Printed, parity, spell
from ..records import Rank
from .charts import marked

PRINTED = 5
"""Printed numbers of which a finding is made."""


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
    stderr: str = ""
    """Its end."""
    findings: Sequence[Finding] = ()
    """What the doctor found in it, where it looked."""
    precision: str = ""
    """What ran in which dtype, where it looked."""

    def to_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        same = {name: getattr(self, name) for name in ("name", "full", "losses", "skipped", "metrics")}
        return {**same, "seed_offset": self.offset, "exit_code": self.status, "seconds": round(self.seconds, 2)}


def losses_of(rank: Rank) -> list[float]:
    """The loss of every attempt to step; what JSON cannot spell is NaN."""
    losses = (step["loss"] for step in rank.steps)
    return [float(loss) if isinstance(loss, (int, float)) else math.nan for loss in losses]


def pairs_of(runs: Sequence[Ran]) -> list[tuple[Ran, Ran]]:
    """The mixed and the full run of each seed, where both have steps."""
    full = {ran.offset: ran for ran in runs if ran.full and ran.losses}
    return [(ran, full[ran.offset]) for ran in runs if not ran.full and ran.offset in full and ran.losses]


def build_comparison(runs: Sequence[Ran], margin: float | None, command: list[str]) -> tuple[Report, dict[str, Any]]:
    """The report as a page, and as the content of `compare.json`."""
    pairs = pairs_of(runs)
    found = parity([Pair(mixed.losses, full.losses) for mixed, full in pairs], margin)
    differing = [one for one in printed(runs) if one.differs]
    line = f"{failures(runs)}{verdict(found, len(pairs))}"
    findings = PA206().of(found, differing[:PRINTED], [each for ran in runs for each in ran.findings])
    line += "".join(f" But {one}." for one in differing[:1])
    precision = next((ran.precision for ran in runs if ran.precision), "not looked at")
    steps, seconds = max((len(ran.losses) for ran in runs), default=0), round(sum(ran.seconds for ran in runs), 1)
    environment = {"command": " ".join(command), "mixed precision": precision, "pairs": len(pairs), "steps": steps}
    environment |= {"seconds": seconds, "torch": version("torch")}
    environment |= {"processor": platform.processor() or platform.machine(), "preamp": __version__}
    share = f"at least {LEAST:.1%} of the loss, or {SPREADS:g} standard deviations of full precision over its seeds"
    notes = (
        "the loss is the mean of a run's last tenth of steps; a seed is the script's own plus the offset",
        f"mixed is what the script runs: {precision}; full is the same in float32",
        f"the margin is a difference that does not matter: {share if margin is None else f'{margin:.1%} of the loss'}",
    )
    sections = [Section("Result", "", (*findings, _results(runs, found, notes)))]
    metrics = _metrics(runs)
    if metrics is not None:
        what = "The last number under each name, over the seeds."
        sections.append(Section("What the script printed", what, (metrics,)))
    status: Status | None = "good" if found.verdict == "equivalent" else "neutral"
    if any(finding.severity != "info" for finding in findings):
        status = None
    elif failures(runs):
        status = "warning"
    content: dict[str, Any] = {"schema": "preamp-compare/1", "verdict": line, "result": found.verdict}
    content |= {name: getattr(found, name) for name in ("difference", "interval", "margin", "parted")}
    content |= {"findings": [one.to_dict() for one in findings], "runs": [ran.to_dict() for ran in runs]}
    content = to_json(content | {"environment": environment})
    title, meanings = f"Compare: {Path(command[0]).name}", glossary(finding.code for finding in findings)
    words, paste = advice(found, command)
    if failures(runs):
        words, paste = "Mend these runs first; the doctor says how:", f"preamp doctor {shlex.join(command)}"
    report = Report(
        title, line, sections, picture=_losses(runs, found), advice=words, paste=paste, environment=environment,
        status=status, data=content, glossary=meanings,
    )  # fmt: skip
    return report, content


def failures(runs: Sequence[Ran]) -> str:
    """A sentence on the runs that trained nothing or did not come to their end, and a space; "" without any."""
    idle = [ran for ran in runs if ran.losses and ran.skipped == len(ran.losses)]
    failed = [ran for ran in runs if ran.status]
    if idle and not failed:
        name, steps = idle[0].name, idle[0].skipped
        return f"{len(idle)} of {len(runs)} runs trained nothing: all {steps} steps of {name} were skipped. "
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


def advice(found: Parity, command: Sequence[str]) -> tuple[str, str]:
    """What to do, in words, and what to paste for it."""
    words = "Keep training in 16 bits: over these seeds it costs nothing. The doctor watches longer runs:"
    ask = "doctor"
    if found.verdict == "identical":
        words = "Ask the doctor why 16 bits are not in effect:"
    elif not all(map(math.isfinite, found.full)):
        words = "Mend the training in float32 first; the doctor names the operator that makes the first inf or nan:"
    elif found.verdict == "undecided":
        words = "Compare again with more seeds, or say with `--margin` which share of the loss does not matter:"
        ask = f"compare --seeds {max(6, 2 * len(found.full))}"
    elif found.verdict == "worse":
        words = "Ask the doctor what 16 bits lose:"
    return words, f"preamp {ask} {shlex.join(command)}"


def _results(runs: Sequence[Ran], found: Parity, notes: Sequence[str]) -> Table:
    rows = [
        (f"+{ran.offset}", spell(a), spell(b), spell(a - b), ran.skipped, len(ran.losses))
        for (ran, _), a, b in zip(pairs_of(runs), found.mixed, found.full, strict=True)
    ]
    return Table("Final loss", ("seed", "mixed", "full", "difference", "skipped", "steps"), rows, notes=notes)


def _losses(runs: Sequence[Ran], found: Parity) -> LineChart:
    """Both precisions at each step over the same seeds: those whose two losses there are finite."""
    pairs = [[*zip(mixed.losses, full.losses, strict=False)] for mixed, full in pairs_of(runs)]
    steps = range(max(map(len, pairs), default=0))
    at = [[pair[step] for pair in pairs if step < len(pair)] for step in steps]
    finite = [[both for both in many if all(map(math.isfinite, both))] for many in at]
    series = []
    for side, name in enumerate(("mixed precision", "full precision")):
        many = [[both[side] for both in pairs] for pairs in finite]
        means = [statistics.fmean(values) if values else None for values in many]
        lows, highs = [min(values, default=None) for values in many], [max(values, default=None) for values in many]
        series.append(Series(name, steps, means, lows, highs, dashed=side == 1))
    marks, spans = marked((step for step in steps if len(finite[step]) < len(at[step])), "not finite")
    if found.parted is not None:
        marks.append(Marker(float(found.parted), None, "apart from here"))
    note = "Lines are means over the seeds, bands reach from the lowest to the highest."
    return LineChart("Loss", "step", "loss", series, markers=marks, spans=spans, note=note, against="full precision")


def printed(runs: Sequence[Ran]) -> list[Printed]:
    """The numbers that all runs printed, and that are neither settings nor the loss."""
    pairs, found = pairs_of(runs), []
    for name in runs[0].metrics if pairs else ():
        if all(name in ran.metrics for pair in pairs for ran in pair):
            mixed, other = (tuple(pair[side].metrics[name] for pair in pairs) for side in (0, 1))
            if len({*mixed, *other}) > 1 and not all(_is_loss(ran, name) for pair in pairs for ran in pair):
                found.append(Printed(name, mixed, other))
    return found


def _is_loss(ran: Ran, name: str) -> bool:
    """Whether a printed number is the loss of the last step, which is judged by itself."""
    return math.isclose(ran.metrics[name], ran.losses[-1], rel_tol=1e-3, abs_tol=5e-5)


def _metrics(runs: Sequence[Ran]) -> Table | None:
    rows = [(one.name, _span(one.mixed), _span(one.full)) for one in printed(runs)]
    return Table("Printed numbers", ("name", "mixed", "full"), rows) if rows else None


def _span(values: Sequence[float]) -> str:
    low, high = spell(min(values)), spell(max(values))
    return low if low == high else f"{low} to {high}"
