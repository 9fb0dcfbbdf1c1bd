"""Parts of the site that are made: the figures of first pages, and the command's own help."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from preamp.cli._app import app

from .docs_gpu import EIGHT, against, contenders_of, peak_share
from .docs_results import PLACED, newest, spans_of_levels

SITE = "https://preamp-amp.github.io/preamp/latest/"
BERT, GPT = "BERT-large b16", "GPT-2048 b4"


def _results(root: Path, theme: str) -> dict[str, Any]:
    path = newest(root, theme)
    if path is None:
        raise FileNotFoundError(f"no results of {theme} are committed")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


@dataclass(frozen=True)
class Figure:
    """A figure for first pages, and where it is from: a section of a page, and what lines of it say."""

    what: str
    says: str
    on: str
    page: str
    """A page below `docs` and a heading's anchor."""
    lines: tuple[tuple[str, ...], ...]
    """For each number the words that stand in one line with it, in that section."""


def measured(root: Path) -> tuple[Figure, ...]:
    """What a reader will measure: whole steps, memory, quality, diagnosis."""
    demo = _results(root, "demo")
    within, judged = sum(j["within"] for j in demo["judgements"]), len(demo["judgements"])
    span, native = spans_of_levels(root, "cpu-levels-native")
    slow, fast = span("torch.amp", "O4 O5").split(" to ")
    versus = _results(root, "doctor-versus")
    sick = [row for row in versus["rows"] if row["group"] != "healthy"]
    named = sum(row["doctor"]["outcome"] in PLACED for row in sick)
    cpu = f"{native['cpu']}, with bfloat16 arithmetic"
    gpu = _results(root, "gpu")
    trained = {row["name"]: contenders_of(row) for row in gpu["suites"]["steps"]}
    steps = {work: f"{against(trained[work], 'preamp O2')['median']:.2f}" for work in (BERT, GPT)}
    peaks = {work: f"{peak_share(trained[work], EIGHT):.2f}" for work in steps}
    return (
        Figure(
            f"{steps[BERT]} to {steps[GPT]} times",
            "the speed of torch.amp in float16 on a GPU: a whole training step at O2, of BERT-large and of a GPT",
            gpu["environment"]["gpu"], "gpu.md#whole-training-steps",
            tuple((work, "preamp O2", speed) for work, speed in steps.items()),
        ),
        Figure(
            f"{peaks[GPT]} to {peaks[BERT]}",
            "of torch.amp's peak memory on a GPU: O5 with split masters and 8-bit states, the same networks",
            gpu["environment"]["gpu"], "gpu.md#whole-training-steps",
            tuple((work, EIGHT, share) for work, share in peaks.items()),
        ),
        Figure(
            f"{slow} to {fast} times",
            "the speed of torch.amp in bfloat16 on a CPU: a whole training step at O4 and O5, over four networks",
            cpu, "cpu.md#what-it-costs-and-what-it-saves",
            (("seresnext", "O4", slow), ("bert", "O4", fast)),
        ),
        Figure(
            f"{within} of {judged}",
            "16-bit results are as good as the worst of three float32 seeds, or better: four networks at O1, O2, "
            "O4 and O5",
            demo["environment"]["cpu"], "measured.md#the-demo",
            ((f"{within} of {judged}",),),
        ),
        Figure(
            f"{named} of {len(sick)}",
            "planted precision bugs are named with their module and line, in the scripts the doctor was improved on",
            versus["environment"]["cpu"], "doctor.md#beside-other-tools",
            (("all sick: named in place", str(named), str(len(sick))),),
        ),
    )  # fmt: skip


def figures(root: Path) -> str:
    """The figures as boxes of the home page."""
    boxes = [
        f'<div markdown="span"><strong>{each.what}</strong> {each.says}. {each.on}. '
        f"[Table and command]({each.page})</div>"
        for each in measured(root)
    ]
    return "\n".join(['<div class="figures" markdown>', *boxes, "</div>"])


def figures_listed(root: Path) -> str:
    """The figures as a list, for the README, whose links are absolute."""
    lines = []
    for each in measured(root):
        page, _, anchor = each.page.partition("#")
        link = f"{SITE}{page.removesuffix('.md')}/#{anchor}"
        lines.append(f"* **{each.what}** {each.says} ({each.on}; [table and command]({link})).")
    return "\n".join(lines)


def commands(root: Path) -> str:
    """What each command says of itself with --help."""
    group: Any = typer.main.get_command(app)
    parts = []
    for name in group.commands:
        told = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "100", "TERMINAL_WIDTH": "100"})
        text = re.sub(r"[ \t]+$", "", told.output, flags=re.MULTILINE).strip()
        parts.append(f"## preamp {name}\n\n```text\n{text}\n```")
    return "\n\n".join(parts)
