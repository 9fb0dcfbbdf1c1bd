"""What a comparison of mixed with full precision shows."""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import __version__
from ..report import Finding, LineChart, Marker, Report, Section, Series, Snippet, Status, Table, format_number, to_json
from ..report.files import write_text
from ._first_step import Error, FirstErrors
from ._pages import glossary
from ._parity import Pair, Parity, parity

if TYPE_CHECKING:
    from ._compare import Ran

SHOWN = 20
"""Modules and parameters in the tables of errors, those with the largest ones."""
APART = 5.0
"""A difference of so many margins is an error; a smaller one beyond the margin a warning."""


def schema() -> dict[str, Any]:
    """The JSON schema of `compare.json` (draft 2020-12)."""
    loaded: dict[str, Any] = json.loads(files(__package__).joinpath("compare.schema.json").read_text(encoding="utf-8"))
    return loaded


def build_comparison(
    runs: Sequence[Ran], pairs: Sequence[Pair], errors: FirstErrors, margin: float | None,
    command: list[str],
) -> tuple[Report, dict[str, Any]]:  # fmt: skip
    """The report as a page, and as the content of `compare.json`."""
    found = parity(pairs, margin)
    line, findings = verdict(found, len(pairs)), findings_of(found, errors)
    environment = {
        "command": " ".join(command), "pairs": len(pairs), "steps": max((len(ran.losses) for ran in runs), default=0),
        "seconds": round(sum(ran.seconds for ran in runs), 1), "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(), "preamp": __version__,
    }  # fmt: skip
    sections = [Section("Result", "", (*findings, _results(runs, found))), *comparison_sections(runs, found, errors)]
    status: Status | None = "good" if found.verdict == "equivalent" else "neutral"
    if any(finding.severity != "info" for finding in findings):
        status = None
    content: dict[str, Any] = to_json({
        "schema": "preamp-compare/1", "verdict": line, "result": found.verdict, "difference": found.difference,
        "interval": found.interval, "margin": found.margin, "parted": found.parted,
        "findings": [finding.to_dict() for finding in findings], "runs": [ran.to_dict() for ran in runs],
        "outputs": [asdict(error) for error in errors.outputs],
        "gradients": [asdict(error) for error in errors.gradients],
        "environment": environment,
    })  # fmt: skip
    report = Report(
        f"Compare: {Path(command[0]).name}",
        line,
        sections,
        environment=environment,
        status=status,
        data=content,
        glossary=glossary(f.code for f in findings),
    )
    return report, content


def write_comparison(report: Report, content: dict[str, Any], folder: Path, also: Path | None) -> Path:
    """Write `compare.html` and `compare.json` into a folder, whole or not at all; returns the page's path."""
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    page = report.write_html(folder / "compare.html")
    write_text(folder / "compare.json", text)
    if also is not None:
        write_text(also, text)
    return page


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
        low, high = (format_number(v, 3) for v in found.interval)
        told += f" (90 % interval {low} to {high}, margin {format_number(found.margin, 3)})"
    words = {
        "equivalent": "Equivalent: ", "worse": "Worse: ", "better": "Lower loss: ",
        "undecided": "Undecided: ",
    }  # fmt: skip
    more = "; more seeds would tell" if found.verdict == "undecided" else ""
    return f"{words[found.verdict]}{told}{more}."


def findings_of(found: Parity, errors: FirstErrors) -> tuple[Finding, ...]:
    """PA206 where mixed precision is worse; PA109 where there is none."""
    if found.verdict == "identical":
        return (
            Finding(
                "PA109", "info", "the losses are the same bits in full precision: nothing here runs in 16 bits",
                fix="with torch.autocast(x.device.type, dtype=torch.bfloat16): ...",
            ),
        )  # fmt: skip
    if found.verdict != "worse":
        return ()
    culprit = errors.culprit
    evidence: dict[str, Any] = {
        "mixed": [_shown(v) for v in found.mixed], "full": [_shown(v) for v in found.full],
        "margin": _shown(found.margin), "apart from step": found.parted,
    }  # fmt: skip
    module = None
    if culprit is not None:
        module = culprit.name
        evidence["relative error of what it gives, in the first step"] = _shown(culprit.relative)
    infinite = math.isinf(found.difference)
    what = "does not end finite" if infinite else f"ends {_shown(found.difference)} above full precision"
    serious = infinite or found.difference > APART * found.margin
    return (
        Finding(
            "PA206", "error" if serious else "warning",
            f"the loss in mixed precision {what}; other seeds change it by less than {_shown(found.margin)}",
            module=module, step=found.parted, evidence=evidence,
            fix=f'preamp.prepare(model, optimizer, policy="O4; {module} -> full")' if module else
            "# look for the first row that is far off in the report's table of the first step; keep that module full",
        ),
    )  # fmt: skip


def _shown(value: float) -> str:
    return format_number(value, 3) if math.isfinite(value) else "not finite"


def _results(runs: Sequence[Ran], found: Parity) -> Table:
    full = {ran.offset: ran for ran in runs if ran.full}
    mixed = [ran for ran in runs if not ran.full and ran.offset in full]
    rows = [
        (f"+{ran.offset}", _shown(a), _shown(b), _shown(a - b), ran.skipped, len(ran.losses))
        for ran, a, b in zip(mixed, found.mixed, found.full, strict=False)
    ]
    notes = ("the loss is the mean of a run's last tenth of steps; a seed is the script's own plus the offset",)
    return Table("Final loss", ("seed", "mixed", "full", "difference", "skipped", "steps"), rows, notes=notes)


def comparison_sections(runs: Sequence[Ran], found: Parity, errors: FirstErrors) -> list[Section]:
    """Losses over time, printed metrics, and the first step."""
    sections = [
        Section(
            "Loss",
            "Lines are means over the seeds, bands reach from the lowest to the highest.",
            (_losses(runs, found),),
        )
    ]
    metrics = _metrics(runs)
    if metrics is not None:
        sections.append(
            Section("What the script printed", "The last number under each name, over the seeds.", (metrics,))
        )
    if errors.outputs or errors.gradients:
        sections.append(_first_step(errors))
    return sections


def _losses(runs: Sequence[Ran], found: Parity) -> LineChart:
    series = []
    for name, full in (("mixed precision", False), ("full precision", True)):
        many = [ran.losses for ran in runs if ran.full is full]
        steps = range(max(map(len, many), default=0))
        at = [[one[step] for one in many if step < len(one) and math.isfinite(one[step])] for step in steps]
        series.append(
            Series(
                name, steps, [statistics.fmean(v) if v else None for v in at], [min(v, default=None) for v in at],
                [max(v, default=None) for v in at], dashed=full,
            )
        )  # fmt: skip
    marks = () if found.parted is None else (Marker(float(found.parted), None, "apart from here"),)
    return LineChart("Loss", "step", "loss", series, markers=marks)


def _metrics(runs: Sequence[Ran]) -> Table | None:
    names = [name for name in runs[0].metrics if all(name in ran.metrics for ran in runs)]
    rows = []
    for name in names:
        sides = [[ran.metrics[name] for ran in runs if ran.full is full] for full in (False, True)]
        if all(len({*side}) == 1 for side in sides) and sides[0][0] == sides[1][0]:
            continue  # a setting
        rows.append((name, *(_span(side) for side in sides)))
    return Table("Printed numbers", ("name", "mixed", "full"), rows) if rows else None


def _span(values: Sequence[float]) -> str:
    low, high = _shown(min(values)), _shown(max(values))
    return low if low == high else f"{low} to {high}"


def _first_step(errors: FirstErrors) -> Section:
    text = (
        "Both runs begin with the same weights and the same batch, so their first step is one function in two "
        "precisions. A rounding to 16 bits is off by a percent at most; a relative error near 1, or a direction "
        "(cosine) far from 1, is another function. Dropout may draw other masks in other dtypes, which adds to it."
    )
    items: list[Any] = []
    for title, name, many in (
        ("What modules gave, mixed against full", "module", errors.outputs),
        ("Gradients, mixed against full", "parameter", errors.gradients),
    ):
        worst = sorted(many, key=lambda e: -e.relative)[:SHOWN]
        rows = [_row(error) for error in many if error in worst]
        if rows:
            items.append(Table(title, (name, "relative error (L2)", "cosine", "lost to zero"), rows))
    culprit = errors.culprit
    if culprit is not None and culprit.name:
        line = f'preamp.prepare(model, optimizer, policy="O4; {culprit.name} -> full")'
        items.append(Snippet("The first module that gives something else; in full precision:", line))
    return Section("The first step", text, items)


def _row(error: Error) -> tuple[str, ...]:
    relative = "inf" if math.isinf(error.relative) else f"{error.relative:.2%}"
    return error.name or "(root)", relative, f"{error.cosine:.5f}", f"{error.lost:.2%}"
