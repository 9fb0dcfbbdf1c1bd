"""`preamp bench`: runs suites, prints ratios, writes every sample."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rich.console import Console

from ..bench import SUITES, environment, keep_heap, suite_named, suite_table
from ..report import Table
from ..report.files import write_text

SCHEMA = "preamp-bench/1"


def run_suites(
    names: list[str] | None, rounds: int, device_name: str | None, out: Path, console: Console
) -> tuple[list[Table], Path]:
    """Run the suites named (all), and write `results.json`."""
    heap_kept = keep_heap()
    device = torch.device(device_name or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = {name: suite_named(name) for name in names or SUITES}
    tables, suites = [], {}
    for name, suite in chosen.items():

        def tell(what: str, name: str = name) -> None:
            console.print(f"[dim]{name}: {what}[/dim]")

        rows = suite(device, rounds, tell)
        suites[name] = [row.to_dict() for row in rows]
        tables.append(suite_table(name, rows))
    content = {
        "schema": SCHEMA,
        "environment": {**environment(device), "heap kept": heap_kept},
        "rounds": rounds,
        "suites": suites,
    }
    return tables, write_text(out / "results.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
