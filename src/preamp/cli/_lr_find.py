"""`preamp lr-find`: the range test on a network of the zoo."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from ..bench import environment, range_test
from ..errors import MissingExtra, PreampError
from ..lr_finder import LrCurve
from ..report import Column, Report, Section, Table, to_json, write_png
from ..report.files import write_text
from ..zoo import TASKS

SCHEMA = "preamp-lr-find/1"


@dataclass(frozen=True)
class Found:
    """A curve, and where it was written."""

    curve: LrCurve
    table: Table
    files: dict[str, Path]


def find(
    name: str, level: str, size: str, steps: int, start: float, end: float, batch_size: int | None,
    device_name: str | None, out: Path, console: Console,
) -> Found:  # fmt: skip
    """Sweep one network and write `lr.html`, `lr.json` and, with matplotlib, `lr.png`."""
    if name not in TASKS:
        raise PreampError(f"there is no model {name!r}; the models are {', '.join(TASKS)}")
    task = TASKS[name]
    if size not in task.sizes:
        raise PreampError(f"there is no size {size!r}; the sizes are {', '.join(task.sizes)}")
    device = torch.device(device_name or ("cuda" if torch.cuda.is_available() else "cpu"))
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(f"{name} {level}", total=steps)
        test = range_test(
            task, level, size=size, device=device, steps=steps, start_lr=start, end_lr=end, batch_size=batch_size,
            on_step=lambda step: progress.update(bar, completed=step + 1),
        )  # fmt: skip
    curve, chart, shown_level = test.curve, test.chart, test.level
    rows = [(what, lr) for what, lr in curve.suggestions.items()]
    ending = "stopped where the loss diverged" if curve.diverged else "went to the last rate"
    notes = (f"{len(curve.lrs)} steps, {curve.skipped} skipped by the loss scale; {ending}",)
    table = Table(f"Learning rates for {name} at {shown_level}", ("suggestion", Column("rate")), rows, notes=notes)
    data = to_json({
        "schema": SCHEMA, "model": name, "level": shown_level, "size": size, "environment": environment(device),
        "curve": curve.to_dict(),
    })  # fmt: skip
    verdict = f"Try {curve.valley:.2g} (valley)." if curve.valley else "No valley found: look at the curve."
    report = Report(
        "preamp lr-find", verdict, (Section(task.title, task.data, (chart, table)),),
        environment=environment(device), data=data, status="neutral",
    )  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    files = {"report": report.write_html(out / "lr.html"), "data": out / "lr.json"}
    write_text(files["data"], json.dumps(data, indent=1, allow_nan=False) + "\n")
    try:
        write_png(chart, out / "lr.png")
        files["picture"] = out / "lr.png"
    except MissingExtra as error:
        console.print(f"no picture: {error}", highlight=False)
    return Found(curve, table, files)
