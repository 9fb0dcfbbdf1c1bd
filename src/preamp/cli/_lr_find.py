"""`preamp lr-find`: the range test on a network of the zoo."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from ..demo import range_test
from ..machine import device_named, environment
from ..report import Report, Section, Table, to_json
from ..report.files import write_json
from ..zoo import task_named

LR_SCHEMA = "preamp-lr-find/1"


def find_lr(
    name: str, level: str, size: str, steps: int, start: float, end: float, batch_size: int | None,
    device_name: str | None, out: Path, console: Console,
) -> tuple[Table, dict[str, Path]]:  # fmt: skip
    """Sweep one network and write `lr.html` and `lr.json`: the table and these files."""
    task, device = task_named(name, size), device_named(device_name)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(f"{name} {level}", total=steps)
        test = range_test(
            task, level, size=size, device=device, steps=steps, start_lr=start, end_lr=end, batch_size=batch_size,
            on_step=lambda step: progress.update(bar, completed=step + 1),
        )  # fmt: skip
    curve, chart, shown_level = test.curve, test.chart, test.level
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
        picture=chart,
        advice="Let the rate rise to it and fall again:"
        if valley
        else "Sweep again, with another `--start` and `--end`.",
        paste=f"torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr={valley}, total_steps=steps)" if valley else "",
        environment=environment(device),
        data=data,
        status="neutral",
    )
    return table, {"report": report.write_html(out / "lr.html"), "data": write_json(out / "lr.json", data)}
