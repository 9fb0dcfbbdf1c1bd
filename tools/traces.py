"""Recording the traces in `benchmarks/traces`, and filing what the suite `schedules` finds in them.

Run as `python -m tools.traces` it files the results, and with `--record` it records the traces anew before.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from preamp.bench import environment, record, schedules
from preamp.bench._machine import cpu_name
from preamp.bench._results import SCHEMA
from preamp.report.files import write_json
from preamp.zoo import TASKS

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (0, 1, 2, 3)


def record_traces(folder: Path, *, seeds: Sequence[int] = SEEDS, tell: Callable[[str], None] = print) -> None:
    """Record every network of the zoo, size "ci": about three minutes on two cores."""
    for task in TASKS.values():
        for seed in seeds:
            tell(f"recording {task.name}, seed {seed}")
            record(task, seed=seed).save(folder / f"{task.name}_{seed}.npz")


def write_schedules(root: Path, *, tell: Callable[[str], None] = print) -> Path:
    """Run the suite and write `schedules_<hardware>_<date>_<commit>.json` below `root`, in `benchmarks/results`.

    Traces are those in `benchmarks/traces`; where there are none they are recorded first.
    """
    folder = root / "benchmarks" / "traces"
    if not list(folder.glob("*.npz")):
        record_traces(folder, tell=tell)
    device = torch.device("cpu")
    about = environment(device)
    rows = schedules(device, 1, tell, folder=folder)
    content = {
        "schema": SCHEMA,
        "environment": about,
        "rounds": 1,
        "suites": {"schedules": [row.to_dict() for row in rows]},
    }
    hardware = cpu_name().removeprefix("AMD ").replace(",", "").replace(" ", "-").lower()
    commit = str(about["commit"] or "unknown").rstrip("+")
    name = f"schedules_{hardware}_{time.strftime('%Y-%m-%d')}_{commit}.json"
    return write_json(root / "benchmarks" / "results" / name, content)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m tools.traces", description=__doc__)
    parser.add_argument("--record", action="store_true", help="record the traces anew (three minutes)")
    if parser.parse_args().record:
        record_traces(ROOT / "benchmarks" / "traces")
    print(write_schedules(ROOT))
