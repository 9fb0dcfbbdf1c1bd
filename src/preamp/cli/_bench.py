"""`preamp bench`: runs suites, prints ratios, writes every sample."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..bench import SUITES, Results, environment, goals, goals_table, keep_heap, suite_named, suite_table
from ..report import Table


def run_suites(
    names: list[str] | None, rounds: int, device_name: str | None, out: Path, console: Console,
    *, size: str | None = None, budget: float | None = None, parts: Sequence[str] | None = None,
    earlier: Sequence[Path] = (),
) -> tuple[list[Table], Path]:  # fmt: skip
    """Run the suites named (all), and write `results.json` anew after each row.

    `size` is that of the suites `training` and `step`, `budget` (seconds) and `parts` those of `training`. `earlier`:
    folders with results of this device, which are taken over; only what they lack is measured.
    """
    heap_kept = keep_heap()
    device = torch.device(device_name or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = {name: suite_named(name) for name in names or SUITES}
    about = environment(device)
    hardware = about.get("gpu") or about["cpu"]
    results = Results(out / "results.json", {**about, "heap kept": heap_kept}, rounds)
    for folder in earlier:
        for aside in results.take(folder, chosen):
            console.print(aside, markup=False, highlight=False, soft_wrap=True)
    tables: list[Table] = []
    for name, suite in chosen.items():

        def tell(what: str, name: str = name) -> None:
            console.print(f"{name}, {hardware}: {what}", style="dim", markup=False, highlight=False, soft_wrap=True)
            console.file.flush()

        run: Callable[..., Iterable[Any]] = suite
        if name == "training":
            run = functools.partial(run, size=size, budget=budget, parts=parts)
        elif name == "step":
            run = functools.partial(run, size=size)
        rows = []
        for row in run(device, rounds, tell, missing=results.missing(name)):
            rows.append(row)
            results.add(name, row)
            if name == "training":
                results.judge(goals(results.suites))
        tables += [suite_table(name, rows, hardware)] if rows else []
    if "training" in results.suites:
        judged = goals(results.suites)
        results.judge(judged)
        tables.append(goals_table(judged))
    return tables, results.write()
