"""`preamp bench`: runs suites, prints ratios, writes every sample. `preamp lr-find`: the range test on a network."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from ..bench import (
    PARTS,
    SUITES,
    Results,
    bench_report,
    device_named,
    environment,
    keep_heap,
    range_test,
    suite_named,
    suite_table,
)  # fmt: skip
from ..errors import PreampError
from ..report import Report, Section, Table, to_json
from ..report.files import write_json
from ..zoo import task_named

LR_SCHEMA = "preamp-lr-find/1"


def run_suites(
    names: list[str] | None, rounds: int, device_name: str | None, out: Path, console: Console,
    *, size: str | None = None, budget: float | None = None, parts: Sequence[str] | None = None,
    earlier: Sequence[Path] = (),
) -> tuple[list[Table], Path]:  # fmt: skip
    """Run the suites named (all), and write `results.json` anew after each row.

    `size` is that of the suites in `PARTS` and of `step`, `budget` (seconds) and `parts` are for those in `PARTS`.
    `earlier`: folders with results of this device, which are taken over; only what they lack is measured.
    `report.html` is written after each suite, also of a run that breaks off.
    """
    heap_kept = keep_heap()
    device = device_named(device_name)
    chosen = {name: suite_named(name) for name in names or SUITES}
    about = environment(device)
    hardware = about.get("gpu") or about["cpu"]
    about["heap kept"] = heap_kept
    results = Results(out / "results.json", about, rounds)
    for folder in earlier:
        for line in results.take(folder, chosen):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    tables: list[Table] = []
    for name, suite in chosen.items():

        def tell(what: str, name: str = name) -> None:
            console.print(f"{name}, {hardware}: {what}", style="dim", markup=False, highlight=False, soft_wrap=True)
            console.file.flush()

        run: Callable[..., Iterable[Any]] = suite
        if name in PARTS:
            run = functools.partial(run, size=size, budget=budget, parts=_own(name, parts))
        elif name == "step":
            run = functools.partial(run, size=size)
        rows = []
        try:
            for row in run(device, rounds, tell, missing=results.missing(name)):
                rows.append(row)
                results.add(name, row)
        finally:
            if results.suites:
                bench_report(results.suites, about).write_html(out / "report.html")
        tables += [suite_table(name, rows, hardware)] if rows else []
    return tables, results.write()


def write_report(path: Path, out: Path) -> Path:
    """Write `report.html` in `out` of the file of a bench; its path."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        suites, about = dict(content["suites"]), content["environment"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PreampError(f"{path} is no results.json of a bench ({type(error).__name__}: {error})") from None
    return bench_report(suites, about).write_html(out / "report.html")


def _own(suite: str, parts: Sequence[str] | None) -> list[str] | None:
    """Of the parts asked for, those of a suite; what is none of any suite stays, to be refused by name."""
    if parts is None:
        return None
    others = {part for name, groups in PARTS.items() if name != suite for part in groups}
    return [part for part in parts if part not in others]


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
