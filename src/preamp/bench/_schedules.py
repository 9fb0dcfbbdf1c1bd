"""The suite `schedules`: every schedule of the loss scale over the traces of the zoo, from good and bad starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..report import Column, Table
from ..scaling import SCHEDULES, DynamicScale
from ..zoo import TASKS
from ._replay import OVERFLOW, Replay, replay
from ._results import EVERYTHING, Missing
from ._traces import Trace, load_trace, record

STARTS: dict[str, Callable[[float], float]] = {
    "2^20 too high": lambda settled: settled * 2.0**20,
    "2^16": lambda settled: 2.0**16,
    "2^20 too low": lambda settled: settled / 2.0**20,
}
"""Where a scale starts, from the one at which backoff settles."""

TRACES = Path(__file__).resolve().parents[3] / "benchmarks" / "traces"
"""The committed traces, in a source tree."""


@dataclass(frozen=True)
class ScheduleRow:
    """The schedules on one network from one start, one replay a seed, in the order of the traces."""

    task: str
    start: str
    replays: Mapping[str, Sequence[Replay]]
    largest: Sequence[float]
    """log2 of the largest scale that would not have overflowed, by step of the first trace."""

    def to_dict(self) -> dict[str, Any]:
        """Figures of each schedule over all traces; of the first trace also the scale and its limit by step."""
        return {
            "name": _name(self.task, self.start),
            "task": self.task,
            "start": self.start,
            "seeds": len(next(iter(self.replays.values()))),
            "log2 largest scale": [round(value, 1) for value in self.largest],
            "contenders": [{"name": name, **_summary(replays)} for name, replays in self.replays.items()],
        }


def _name(task: str, start: str) -> str:
    return f"{task}, {start}"


def _summary(replays: Sequence[Replay]) -> dict[str, Any]:
    flushed = sum(each.flushed_entries for each in replays)
    nonzero = sum(each.nonzero_entries for each in replays)
    first = replays[0].to_dict()
    return {
        "steps": sum(len(each.scales) for each in replays),
        "skips": sum(len(each.skipped) for each in replays),
        "skips by seed": [len(each.skipped) for each in replays],
        "flushed": flushed / nonzero if nonzero else 0.0,
        "flushed entries": flushed,
        "flushed entries by seed": [each.flushed_entries for each in replays],
        "non-zero entries": nonzero,
        "first": {key: first[key] for key in ("skipped", "log2 scale, steps")},
    }


def schedules(
    device: torch.device,
    rounds: int,
    tell: Callable[[str], None],
    *,
    folder: Path = TRACES,
    seeds: Sequence[int] | None = None,
    missing: Missing = EVERYTHING,
) -> Iterator[ScheduleRow]:
    """Replay the traces in `folder`, or of them those of `seeds`; where there are none, record one a network (minutes).

    `device` and `rounds` do not matter: traces are on the CPU, and a replay gives the same figures every time.
    """
    for task, traces in _by_task(folder, seeds, tell).items():
        tell(f"replays of {task}")
        settled = [replay(trace, DynamicScale(2.0**60)).scales[-1] for trace in traces]
        with np.errstate(divide="ignore"):
            largest = np.log2(OVERFLOW / np.maximum(traces[0].weights, traces[0].activations).astype(np.float64))
        for start in missing.of(STARTS, lambda start, task=task: _name(task, start)):  # type: ignore[misc]
            replays = {
                name: [replay(trace, kind(STARTS[start](s))) for trace, s in zip(traces, settled, strict=True)]
                for name, kind in SCHEDULES.items()
            }
            yield ScheduleRow(task, start, replays, largest.tolist())


def schedule_table(rows: Sequence[ScheduleRow]) -> Table:
    """What the suite prints."""
    cells = [
        (row.task, row.start, each["name"], each["skips"], 1e6 * each["flushed"])
        for row in rows
        for each in row.to_dict()["contenders"]
    ]
    columns = ("network", "start", "schedule", Column("skips", digits=0), Column("flushed", "ppm", 3))
    return Table("Schedules of the loss scale, replayed", columns, cells)


def _by_task(folder: Path, seeds: Sequence[int] | None, tell: Callable[[str], None]) -> dict[str, list[Trace]]:
    paths = sorted(folder.glob("*.npz"))
    if paths:
        traces = [trace for trace in map(load_trace, paths) if seeds is None or trace.about["seed"] in seeds]
    else:
        traces = []
        for task in TASKS.values():
            tell(f"recording {task.name}")
            traces.append(record(task))
    return {name: found for name in TASKS if (found := [trace for trace in traces if trace.task == name])}
