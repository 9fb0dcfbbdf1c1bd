"""Measures preamp against torch.amp, contenders in turn in one process, as ratios.

Rows that results.json in the folder has are not measured again; each other is written there as it is measured.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from preamp.errors import PreampError
from preamp.machine import device_named, environment

from .harness import Results, Row, Setting, run
from .lists import list_rows, step_rows
from .measures import losses, memory, steps
from .race import keep_heap
from .regions import region_rows, session_rows
from .report import report
from .trainers import BATCHES, EAGER, LOSSES, fitting, fitting_compiled
from .works import Work, works

NETWORKS: dict[str, tuple[Callable[[Work], Callable[[Setting], dict[str, Any]]], float]] = {
    "steps": (lambda work: partial(steps, work.name, fitting(EAGER, work)), 120),
    "compiled": (lambda work: partial(steps, work.name, fitting_compiled(work)), 330),
    "losses": (lambda work: partial(losses, work.name, fitting(LOSSES, work)), 130),
    "memory": (lambda work: partial(memory, work.name, fitting(BATCHES, work)), 65),
}
"""Suites that train networks: what measures a work, and the seconds that the longest takes by estimate."""


def of_networks(suite: str, setting: Setting) -> Iterator[Row]:
    """The rows of a suite that trains networks."""
    measured, seconds = NETWORKS[suite]
    for work in works(setting.tiny).values():
        if work.apart or suite in ("steps", "compiled"):
            yield Row(suite=suite, name=work.name, what=work.what, measure=measured(work), seconds=seconds)


ON_CPU = ("regions", "sessions", "step")
"""Suites that say something about a CPU; of the others one sees there, with --tiny, that they work."""

SUITES: dict[str, Callable[[Setting], Iterable[Row]]] = {
    "regions": region_rows,
    "sessions": session_rows,
    "step": step_rows,
    "lists": list_rows,
    **{name: partial(of_networks, name) for name in NETWORKS},
}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser("./dev bench", description=__doc__, allow_abbrev=False)
    known = ", ".join(SUITES)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{known}; by default those that suit the device")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name has it")
    parser.add_argument("--rounds", type=int, default=15, help="each gives one ratio (15)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ...; the GPU if there is one")
    parser.add_argument("--out", type=Path, default=Path("preamp-bench"), help="folder of results.json and report.html")
    parser.add_argument("--again", action="store_true", help="measure anew what the folder has")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no row that takes longer, by estimate")
    parser.add_argument("--tiny", action="store_true", help="a size that shows that all works, and nothing about speed")
    asked = parser.parse_args(arguments)
    if unknown := [name for name in asked.suites if name not in SUITES]:
        parser.error(f"there is no suite {unknown[0]!r}; the suites are {known}")
    device = device_named(asked.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.backends.cudnn.benchmark = True
        # the profiler, started again while CUDA graphs are about, must not have been shut down in between
        os.environ |= {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
    able = [*SUITES] if asked.tiny or device.type == "cuda" else ON_CPU
    if idle := [name for name in asked.suites if name not in able]:
        parser.error(f"{idle[0]} takes a CUDA device; --tiny shows on a CPU that it works")
    about = {**environment(device), "heap kept": keep_heap()}
    setting, path = Setting(device=device, rounds=asked.rounds, tiny=asked.tiny), asked.out / "report.html"
    results = Results(asked.out / "results.json", about, asked.rounds)
    rows = [row for name in asked.suites or able for row in SUITES[name](setting) if asked.only in row.name]
    try:
        left = run(rows, results, setting, seconds=asked.seconds, again=asked.again)
    finally:
        report(results.content["suites"], about).write_html(path)
    print(f"report: {path}\ndata:   {results.path}")
    if left:
        names = ", ".join(f"{row.suite}: {row.name}" for row in left)
        print(f"left for another call, about {sum(row.seconds for row in left):.0f} s: {names}")


if __name__ == "__main__":
    try:
        main()
    except PreampError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
