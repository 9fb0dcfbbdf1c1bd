"""`preamp bench`: runs suites, prints ratios, writes every sample."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..bench import SUITES, TrainingRow, environment, goals, goals_table, keep_heap, suite_named, suite_table
from ..report import Table
from ..report.files import write_text

SCHEMA = "preamp-bench/1"


def run_suites(
    names: list[str] | None, rounds: int, device_name: str | None, out: Path, console: Console,
    *, size: str | None = None, budget: float | None = None,
) -> tuple[list[Table], Path]:  # fmt: skip
    """Run the suites named (all), and write `results.json`: anew after each, and after each row of `training`.

    `size` and `budget` (seconds) are those of the suite `training`.
    """
    heap_kept = keep_heap()
    device = torch.device(device_name or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = {name: suite_named(name) for name in names or SUITES}
    tables: list[Table] = []
    suites: dict[str, list[dict[str, Any]]] = {}
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "environment": {**environment(device), "heap kept": heap_kept},
        "rounds": rounds,
        "suites": suites,
    }

    def write() -> Path:
        return write_text(out / "results.json", json.dumps(content, indent=1, allow_nan=False) + "\n")

    def keep(rows: Sequence[TrainingRow]) -> None:
        suites["training"] = [row.to_dict() for row in rows]
        content["goals"] = goals(suites)
        write()

    for name, suite in chosen.items():

        def tell(what: str, name: str = name) -> None:
            console.print(f"{name}: {what}", style="dim", markup=False, highlight=False, soft_wrap=True)
            console.file.flush()

        run: Callable[..., Sequence[Any]] = suite
        if name == "training":
            run = functools.partial(run, size=size, budget=budget, keep=keep)
        rows = run(device, rounds, tell)
        suites[name] = [row.to_dict() for row in rows]
        tables.append(suite_table(name, rows))
        if "training" in suites:
            content["goals"] = goals(suites)
        write()
    if "goals" in content:
        tables.append(goals_table(content["goals"]))
    return tables, write()
