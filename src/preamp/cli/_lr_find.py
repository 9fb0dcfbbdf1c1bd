"""`preamp lr-find`: the range test on a network of the zoo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from ..demo import make_optimizer
from ..lr_finder import LrCurve, sweep
from ..machine import device_named, environment
from ..report import LineChart, Marker, Report, Section, Series, Table, to_json
from ..report.files import write_json
from ..session import prepare
from ..zoo import task_named

LR_SCHEMA = "preamp-lr-find/1"


def find_lr(
    name: str, level: str, size: str, steps: int, start: float, end: float, batch_size: int | None,
    device_name: str | None, out: Path, console: Console,
) -> tuple[Table, dict[str, Path]]:  # fmt: skip
    """Sweep one network, clipping as its recipe does, and write `lr.html` and `lr.json`: the table and these files."""
    task, device = task_named(name, size), device_named(device_name)
    recipe = task.recipe(size)
    model = task.build(size, seed=0).to(device)
    optimizer = make_optimizer(recipe, model)
    batches = list(task.batches(size, seed=0, steps=steps, batch_size=batch_size or recipe.batch_size))

    def loss_of(batch: Any) -> torch.Tensor:
        inputs, target = batch
        return task.loss(model(*(x.to(device) for x in inputs)), target.to(device))

    with Progress(console=console, transient=True) as progress, prepare(model, optimizer, level=level) as session:
        bar = progress.add_task(f"{name} {level}", total=steps)
        curve = sweep(
            session, batches, loss_of, start_lr=start, end_lr=end, steps=steps, clip=recipe.clip,
            on_step=lambda step: progress.update(bar, completed=step + 1),
        )  # fmt: skip
        shown_level = session.policy.level or level
    ending = "stopped where the loss diverged" if curve.diverged else "went to the last rate"
    notes = (f"{len(curve.lrs)} steps, {curve.skipped} skipped by the loss scale; {ending}",)
    table = Table(
        f"Learning rates for {name} at {shown_level}", ("suggestion", "rate"), [*curve.suggestions.items()], notes
    )
    data = to_json({
        "schema": LR_SCHEMA, "model": name, "level": shown_level, "size": size, "environment": environment(device),
        "curve": curve.to_dict(),
    })  # fmt: skip
    valley = f"{curve.valley:.2g}" if curve.valley else ""
    report = Report(
        "preamp lr-find",
        f"Try {valley} (valley)." if valley else "No valley found: look at the curve.",
        (Section(task.title, task.data, (table,)),),
        picture=lr_chart(curve, f"{task.title}, {shown_level}"),
        advice="Let the rate rise to it and fall again:"
        if valley
        else "Sweep again, with another `--start` and `--end`.",
        paste=f"torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr={valley}, total_steps=steps)" if valley else "",
        environment=environment(device),
        data=data,
        status="neutral",
    )
    return table, {"report": report.write_html(out / "lr.html"), "data": write_json(out / "lr.json", data)}


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
        f"Range test: {title}",
        "learning rate",
        "loss",
        (Series("smoothed", curve.lrs, smoothed), Series("each batch", curve.lrs, raw, dashed=True)),
        x_log=True,
        markers=markers,
        note=f"{curve.skipped} skipped steps are left out.",
    )
