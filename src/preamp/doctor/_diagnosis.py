"""The report of a watched run, from what its processes wrote down."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from .. import __version__
from ..report import (
    Finding,
    Item,
    LineChart,
    Marker,
    Report,
    Section,
    Series,
    Snippet,
    count_severities,
    to_json,
)
from ..report.files import write_text
from ._audit import section
from ._magnitudes import magnitudes, spread, underflow_table
from ._pages import glossary
from ._ranks import all_findings
from ._records import Rank

STRICT = 3
"""Exit status of --strict when an error was found."""
_MARKS = 40
UNSEEN = "precision not observed"


def schema() -> dict[str, Any]:
    """The JSON schema of `report.json` (draft 2020-12)."""
    text = files(__package__).joinpath("report.schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def verdict(findings: tuple[Finding, ...], steps: int, ended: str, spoken: str) -> str:
    """The one line to remember."""
    if not steps:
        return f"No optimizer step was seen: {ended}. There is nothing to judge the precision by."
    counts = count_severities(findings)
    tail = f" {steps} steps; {ended}."
    if not counts["error"] and not counts["warning"]:
        if spoken == UNSEEN:
            return f"Nothing was found, but no operator could be looked at: compiled code, or no model called.{tail}"
        return f"Nothing is wrong with the precision of this run ({spoken}).{tail}"
    said = [f"{n} {kind}{'s' if n > 1 and kind != 'info' else ''}" for kind, n in counts.items() if n]
    worst = findings[0]
    where = f" in {worst.module}" if worst.module else ""
    where += f" at {worst.file}:{worst.line}" if worst.file and worst.line else ""
    return f"{', '.join(said)} ({spoken}). The worst is {worst.code}{where}: {worst.message}.{tail}"


def policy_seen(rank: Rank | None) -> str:
    """What ran, in a few words."""
    audit = rank.facts.get("audit") if rank is not None else None
    if not audit:
        return UNSEEN
    share = audit["low_share"]
    parameters = "/".join(sorted(audit["parameters"])) or "none"
    return f"{parameters} parameters, {'none' if not share else f'{share:.0%}'} of the products in 16 bits"


def build(
    ranks: list[Rank], base: Path, command: list[str], exit_code: int, ended: str, seconds: float
) -> tuple[Report, dict[str, Any]]:
    """The report as a page, and as the content of `report.json`."""
    findings = all_findings(ranks, base)
    first = next((rank for rank in ranks if rank.steps), None)
    steps = max((len(rank.steps) for rank in ranks), default=0)
    spoken = policy_seen(first)
    line = verdict(findings, steps, ended, spoken)
    broke = next((rank.facts["failed"] for rank in ranks if "failed" in rank.facts), None)
    if broke is not None:
        line += f" The doctor itself failed in step {broke['step']} and saw no more: please report {broke['error']}"
    end = first.facts.get("end", {}) if first is not None else {}
    environment = {
        "command": " ".join(command), "ended": ended, "exit status": exit_code, "steps": steps,
        "processes": len(ranks), "precision": spoken, "seconds": round(seconds, 2),
        "doctor's own seconds": round(end["spent"], 2) if end else None, "preamp": __version__,
    }  # fmt: skip
    serious = any(f.severity != "info" for f in findings)
    sections: list[Section | None] = [Section("Findings", "" if findings else "Nothing was found.", findings)]
    if first is not None:
        samples = first.many.get("telemetry", [])
        has_fp16 = "float16" in first.facts.get("audit", {}).get("low", ())
        really = section(first.facts.get("audit"), first.facts.get("held"))
        spread_out = magnitudes(samples, has_fp16, first.facts.get("underflow"))
        if spread_out is not None:
            measured = underflow_table(first.facts.get("underflow"))
            spread_out = replace(spread_out, items=(*measured, *spread_out.items))
        sections += [_timeline(first), spread_out, really, _advice(findings)]
    content: dict[str, Any] = to_json({
        "schema": "preamp-doctor/1", "verdict": line, "exit_code": exit_code, "ended": ended, "steps": steps,
        "policy": spoken, "findings": [finding.to_dict() for finding in findings],
        "environment": environment, "processes": [_process(rank) for rank in ranks],
    })  # fmt: skip
    report = Report(
        f"Doctor: {Path(command[0]).name}", line, [s for s in sections if s is not None],
        environment=environment, status=None if serious else "good" if steps else "neutral",
        data=content, glossary=glossary(finding.code for finding in findings),
    )  # fmt: skip
    return report, content


def _process(rank: Rank) -> dict[str, Any]:
    return {
        "rank": rank.rank, "steps": rank.steps, "audit": rank.facts.get("audit"),
        "held": rank.facts.get("held"), "raised": rank.facts.get("raised"), "failed": rank.facts.get("failed"),
        "overflows": rank.many.get("overflow", []),
        "telemetry": spread(rank.many.get("telemetry", [])), "underflow": rank.many.get("underflow", []),
    }  # fmt: skip


def _timeline(rank: Rank) -> Section:
    steps = rank.steps
    x = [step["step"] for step in steps]
    skipped = [step["step"] for step in steps if step["skipped"]]
    marks = tuple(  # of those in a row the first is labelled
        Marker(float(step), None, "" if step - 1 in skipped else "skipped") for step in skipped[:_MARKS]
    )
    loss = Series("loss", x, [_number(step["loss"]) for step in steps])
    items: list[Item] = [LineChart("Loss", "step", "loss", (loss,), markers=marks)]
    if any(step["scale"] for step in steps):
        scale = Series("scale", x, [_number(step["scale"]) for step in steps], steps=True)
        items.append(LineChart("Loss scale", "step", "scale", (scale,), y_log2=True, markers=marks))
    text = f"{len(steps)} attempts to step, {len(skipped)} of them skipped."
    return Section("Timeline", text, items)


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) else None


def _advice(findings: tuple[Finding, ...]) -> Section | None:
    sick = [f for f in findings if f.code in ("PA104", "PA201", "PA205") and f.module]
    if not sick:
        return None
    modules = "; ".join(f"{module} -> full" for module in dict.fromkeys(str(f.module) for f in sick))
    snippet = Snippet("Keep these modules in float32", f'preamp.prepare(model, optimizer, policy="O1; {modules}")')
    return Section("What to write", "", (snippet,))


def write(report: Report, content: dict[str, Any], folder: Path, also: Path | None) -> tuple[Path, Path]:
    """Write `report.html` and `report.json` into a folder, whole or not at all; returns their paths."""
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    page = report.write_html(folder / "report.html")
    data = write_text(folder / "report.json", text)
    if also is not None:
        write_text(also, text)
    return page, data
