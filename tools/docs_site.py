"""Parts of the site that are made: the figures of its first page, and the command's own help."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from preamp.cli._app import app

from .docs_results import PLACED, newest


def _results(root: Path, theme: str) -> dict[str, Any]:
    path = newest(root, theme)
    if path is None:
        raise FileNotFoundError(f"no results of {theme} are committed")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def figures(root: Path) -> str:
    """Three figures: quality, speed, diagnosis; each leads to the page that says how it was measured."""
    demo = _results(root, "demo")
    within, judged = sum(j["within"] for j in demo["judgements"]), len(demo["judgements"])
    ratios = {
        row["name"]: contender["ratio"]["median"]
        for row in _results(root, "step")["suites"]["step"]
        for contender in row["contenders"]
        if contender["name"] == "preamp.GradScaler + preamp.optim"
    }
    slow, fast = sorted(ratios[name] for name in ("Adam, BERT-base", "Adam, 1500 x 1k"))
    sick = [row for row in _results(root, "doctor-versus")["rows"] if row["group"] != "healthy"]
    named = sum(row["doctor"]["outcome"] in PLACED for row in sick)
    shown = (
        (
            f"{within} of {judged}",
            "16-bit results are as good as the worst float32 seed, or better: four networks at O1, O2, O4 and O5",
            "levels.md",
        ),
        (
            f"{slow:.1f} to {fast:.1f} times",
            "the speed of torch's scaler with fused Adam: an optimizer step of BERT-base, and of 1500 small tensors",
            "step.md",
        ),
        (
            f"{named} of {len(sick)}",
            "planted precision bugs are named with their module and line, in the scripts the doctor was improved on",
            "doctor.md",
        ),
    )
    boxes = [f'<div markdown="span"><strong>{what}</strong> {text}. [How]({page})</div>' for what, text, page in shown]
    return "\n".join(['<div class="figures" markdown>', *boxes, "</div>"])


def commands(root: Path) -> str:
    """What each command says of itself with --help."""
    group: Any = typer.main.get_command(app)
    parts = []
    for name in group.commands:
        told = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "100", "TERMINAL_WIDTH": "100"})
        text = re.sub(r"[ \t]+$", "", told.output, flags=re.MULTILINE).strip()
        parts.append(f"## preamp {name}\n\n```text\n{text}\n```")
    return "\n\n".join(parts)
