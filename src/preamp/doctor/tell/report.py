"""The report of a watched run, from what its processes recorded: the first screen, and what lies below it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from ... import __version__
from ...report import Finding, Picture, Report, Section, to_json
from ...report.files import write_text
from ..findings import AT_END, glossary, one_of_each
from ..findings.check import Check, counted, with_evidence
from ..records import Rank, shown_path
from .charts import loss_chart, magnitudes, picture, ran_fp16, scale_chart, spread

STRICT = 3
"""Exit status of --strict when an error was found."""
OPTIONS = frozenset({"--every", "--json", "--margin", "--out", "--seeds", "--steps", "--strict"})
"""Of the commands that run a script: behind it they are the script's."""
NO_STEP = "Give the script that trains, with its arguments; a step is one of an optimizer of torch.optim."
"""What to do where no step was seen."""
UNSEEN = "precision not observed"


def schema(name: str = "report") -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of `report.json`, or of `compare.json`."""
    text = files(__package__.rpartition(".")[0]).joinpath(f"{name}.schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def all_findings(ranks: list[Rank], base: Path) -> tuple[Finding, ...]:
    """Findings of all processes, most harmful first; one that several have is reported once, of the earliest step."""
    found: dict[Any, list[tuple[Finding, int]]] = {}
    for rank in ranks:
        for finding in (*rank.findings, *(replace(one, file=shown_path(one.file, base)) for one in judge([rank]))):
            key = (finding.code, finding.severity, finding.module, finding.op, finding.file, finding.line)
            found.setdefault(key, []).append((finding, rank.rank))
    several = len({rank.rank for rank in ranks}) > 1
    merged = [_as_one(same) if several else same[0][0] for same in found.values()]
    return without_echoes(told_once((*merged, *(judge(ranks) if several else ()))))


def told_once(findings: Iterable[Finding]) -> list[Finding]:
    """What is said of a line in the same words of several modules as one finding, which names the others."""
    found: dict[Any, list[Finding]] = {}
    for one in sorted(findings):
        place = (one.code, one.severity, one.message, one.file, one.line)
        found.setdefault(place if one.line is not None else one, []).append(one)
    several = ((one, {"also in": [each.module for each in rest]} if rest else {}) for one, *rest in found.values())
    return [with_evidence(one, **also) if also else one for one, also in several]


def without_echoes(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Most harmful first, without what only announces what another one at the same line has seen to happen."""
    found = sorted(findings)
    told = {(one.file, one.line) for one in found if one.code in _SEEN and one.severity != "info"}
    return tuple(one for one in found if one.code not in _ANNOUNCED or (one.file, one.line) not in told)


_SEEN = frozenset({"PA114", "PA115", "PA201"})
_ANNOUNCED = frozenset({"PA101", "PA103", "PA205"})


def judge(ranks: Sequence[Rank]) -> list[Finding]:
    """What only the whole run of a process shows, or what several show beside each other."""
    ranks = [rank for rank in ranks if rank.steps]
    checks = one_of_each(Check, AT_END)
    if len(ranks) > 1:
        return [finding for check in checks for finding in check.among(ranks)]
    return [finding for rank in ranks for check in checks for finding in check.at_end(rank)]


def _as_one(same: list[tuple[Finding, int]]) -> Finding:
    finding, first = min(same, key=lambda one: (one[0].step is None, one[0].step or 0, one[1]))
    where = {"first on rank": first} if len({one.step for one, _ in same}) > 1 else {}
    return with_evidence(finding, ranks=sorted({rank for _, rank in same}), **where)


def verdict(
    findings: tuple[Finding, ...], steps: int, ended: str, precision: str, looked: str = "", skipped: int = 0
) -> str:
    """The one line to remember."""
    if not steps and all(finding.severity == "info" for finding in findings):
        own = " Mend the script's own error first." if ended.startswith("ended ") else ""
        hint = f" {NO_STEP}" if ended.startswith("ran to its end") else own
        return f"No optimizer step was seen: {ended}. There is nothing to judge the precision by.{hint}"
    tail = f" {steps} steps{f', {skipped} of them skipped' if skipped else ''}; {ended}."
    if all(finding.severity == "info" for finding in findings):
        if precision == UNSEEN:
            return f"Nothing was found, but no operator could be looked at: compiled code, or no model called.{tail}"
        return f"Nothing is wrong with the precision of what was looked at ({precision}): {looked}.{tail}"
    worst = findings[0]
    where = f" in {worst.module}" if worst.module else ""
    where += f" at {worst.file}:{worst.line}" if worst.file and worst.line else ""
    return f"{counted(findings)} ({precision}). The worst is {worst.code}{where}: {worst.message}.{tail}"


def looked_at(rank: Rank | None) -> str:
    """Which steps were followed with shadows, and what was not."""
    if rank is None or "shadow" not in rank.many:
        return "no step was followed operator by operator"
    looks, evaluations = rank.many["shadow"], len(rank.many.get("evaluation", ()))
    steps = [str(one["step"]) for one in looks]
    told = f"step{'s' if len(steps) > 1 else ''} {', '.join(steps[:6])}{', ...' if len(steps) > 6 else ''}"
    if evaluations:
        told += f" and {evaluations} evaluation{'s' if evaluations > 1 else ''}"
    if not all(one["whole"] for one in looks):
        told += ", a module at a time"
    if "threads" in rank.facts:
        told += ", in one thread of several that train"
    skipped = {name for one in looks for name in one["skipped"]}
    return told + (f", without {', '.join(sorted(skipped)[:5])}" if skipped else "")


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
    precision = policy_seen(first)
    skipped = sum(step["skipped"] for step in first.steps) if first is not None else 0
    line = verdict(findings, steps, ended, precision, looked_at(first), skipped)
    died = next((rank.facts["in_float32"] for rank in ranks if "in_float32" in rank.facts), None)
    if died is not None:
        line += (
            " In float32 the script ends by an error there as well." if died["raises"] else " In float32 it goes on."
        )
    broke = next((rank.facts["failed"] for rank in ranks if "failed" in rank.facts), None)
    if late := [] if any(rank.steps for rank in ranks) else [each for each in command[1:] if each in OPTIONS]:
        line += f" {late[0]} was given to the script, since it stands after it: preamp's own options go before."
    if broke is not None:
        line += f" The doctor itself failed in step {broke['step']} and saw no more: please report {broke['error']}"
    headline = headline_of(findings) if broke is None else line
    end = first.facts.get("end", {}) if first is not None else {}
    own = round(end["spent"], 2) if end else None
    environment = {"command": " ".join(command), "ended": ended, "exit status": exit_code, "steps": steps}
    environment |= {"processes": len(ranks), "precision": precision, "seconds": round(seconds, 2)}
    environment |= {"doctor's own seconds": own, "preamp": __version__}
    serious = any(f.severity != "info" for f in findings)
    sections: list[Section | None] = [Section("Findings", "" if findings else "Nothing was found.", findings)]
    shown = None
    if first is not None:
        shown = picture(first, findings[0] if serious else None)
        sections += [_timeline(first, shown), magnitudes(first.many.get("telemetry", []), ran_fp16(first))]
    content = {"schema": "preamp-doctor/1", "verdict": line, "exit_code": exit_code, "ended": ended, "steps": steps}
    content |= {"policy": precision, "findings": [one.to_dict() for one in findings], "environment": environment}
    content = to_json(content | {"processes": [_process(rank, base) for rank in ranks]})
    words, paste = advice(findings, command, bool(steps))
    report = Report(
        f"Doctor: {Path(command[0]).name}",
        line,
        [s for s in sections if s is not None],
        headline=headline,
        picture=shown,
        advice=words,
        paste=paste,
        environment=environment,
        status=None if serious else "good" if steps else "neutral",
        data=content,
        glossary=glossary(finding.code for finding in findings),
    )
    return report, content


def headline_of(findings: Sequence[Finding]) -> str:
    """The worst finding as a sentence; "" where there is none to worry about."""
    if not findings or findings[0].severity == "info":
        return ""
    worst = findings[0]
    name = re.search(r"[._]", worst.message.split(" ")[0])  # of an operator or a function: aten.bmm, clip_grad_norm_
    message = worst.message if name else worst.message[:1].upper() + worst.message[1:]
    return f"{message} ({worst.code}{_place(worst, '')})."


def advice(findings: Sequence[Finding], command: Sequence[str], stepped: bool) -> tuple[str, str]:
    """What to do, in words, and what to paste for it."""
    script = shlex.join(command)
    serious = [finding for finding in findings if finding.severity != "info"]
    if serious:
        worst = serious[0]
        others = f" {counted(serious[1:])} more {'is' if len(serious) == 2 else 'are'} below." if serious[1:] else ""
        cure = f"Begin with `{worst.code}`{_place(worst, '`')}, then run `preamp doctor` again.{others}"
        tried = worst.evidence.get("tried") if isinstance(worst.evidence, dict) else None
        if worst.fix is None and tried:
            cure += f" No fix can be printed: tried {tried}. The page of the code says what else there is to do."
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


def _shown(record: dict[str, Any], base: Path) -> dict[str, Any]:
    """A record with its files as findings have them."""
    lines = ((name, record[name]) for name in ("schedule_at", "loss_at") if record.get(name))
    shown = {name: [shown_path(file, base), line] for name, (file, line) in lines}
    return {**record, **shown, **({"file": shown_path(record["file"], base)} if record.get("file") else {})}


def _process(rank: Rank, base: Path) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "steps": [_shown(step, base) for step in rank.steps],
        **{name: rank.facts.get(name) for name in ("audit", "raised", "failed")},
        "overflows": [_shown(one, base) for one in rank.many.get("overflow", [])],
        "telemetry": spread(rank.many.get("telemetry", [])),
        "underflow": rank.many.get("underflow", []),
    }


def _timeline(rank: Rank, shown: Picture) -> Section:
    """The loss and the loss scale over the steps, without the one that the first screen shows."""
    skipped = sum(step["skipped"] for step in rank.steps)
    both = loss_chart(rank), scale_chart(rank)
    charts = [chart for chart in both if chart is not None and chart.title != shown.title]
    return Section("Timeline", f"{len(rank.steps)} attempts to step, {skipped} of them skipped.", charts)


def write(report: Report, content: dict[str, Any], folder: Path, name: str, also: Path | None) -> Path:
    """Write `NAME.html` and `NAME.json` into a folder, whole or not at all; returns the page's path.

    `also`: another file to write the JSON to.
    """
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    page = report.write_html(folder / f"{name}.html")
    write_text(folder / f"{name}.json", text)
    if also is not None:
        write_text(also, text)
    return page
