"""`preamp lr-find`: the range test on a network of the zoo."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from ..bench import environment, make_optimizer
from ..errors import MissingExtra, PreampError
from ..lr_finder import LrCurve, sweep
from ..report import Column, LineChart, Marker, Report, Section, Series, Table, to_json, write_png
from ..report.files import write_text
from ..session import prepare
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
    recipe = task.recipe(size)
    model = task.build(size, seed=0).to(device)
    optimizer = make_optimizer(recipe, model)
    batches = list(task.batches(size, seed=0, steps=steps, batch_size=batch_size or recipe.batch_size))

    def loss_of(batch: Any) -> torch.Tensor:
        inputs, target = batch
        return task.loss(model(*(x.to(device) for x in inputs)), target.to(device))

    with prepare(model, optimizer, level=level) as session, Progress(console=console, transient=True) as progress:
        bar = progress.add_task(f"{name} {session.policy.level}", total=steps)
        curve = sweep(
            session, batches, loss_of, start_lr=start, end_lr=end, steps=steps, clip=recipe.clip,
            on_step=lambda step: progress.update(bar, completed=step + 1),
        )  # fmt: skip
        shown_level = session.policy.level or level
    chart = lr_chart(curve, f"{task.title}, {shown_level}")
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


def lr_chart(curve: LrCurve, title: str) -> LineChart:
    """Loss against rate, raw and smoothed, the suggestions marked on the smoothed curve."""
    markers = []
    for name, lr in curve.suggestions.items():
        nearest = min(range(len(curve.lrs)), key=lambda i: abs(curve.lrs[i] - lr))
        on_curve = curve.smoothed[nearest] if lr >= curve.lrs[0] else None
        markers.append(Marker(lr, on_curve, f"{name} {lr:.2g}"))
    low, high = min(curve.smoothed), max(curve.smoothed[: max(1, len(curve.smoothed) * 9 // 10)])
    top = high + 0.5 * (high - low)  # the last raw losses may be enormous, and would flatten the curve
    raw = [value if value <= top else None for value in curve.losses]
    smoothed = [value if value <= top else None for value in curve.smoothed]
    return LineChart(
        f"Range test: {title}", "learning rate", "loss",
        (Series("smoothed", curve.lrs, smoothed), Series("each batch", curve.lrs, raw, dashed=True)),
        x_log=True, markers=markers, note=f"{curve.skipped} skipped steps are left out.",
    )  # fmt: skip
