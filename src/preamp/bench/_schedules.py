"""The suite `schedules`: every schedule of the loss scale over the traces of the zoo, from good and bad starts.

A replay is what a loss scale would have done over a recorded run, had it been trained in float16. The gradients of a
step are those of the trace, times the scale, rounded to float16 to nearest, ties to even (IEEE 754-2019, section
4.3.1): at 65520 and beyond infinite, at 2**-25 and below zero, below 2**-14 subnormal. A trace does not know what
another scale would have changed in the run itself, so a replay judges the scale, not the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..formats import FP16
from ..kernels import Reading
from ..report import Column, Table
from ..scaling import SCHEDULES, DynamicScale, LossScale
from ..zoo import TASKS
from ._results import EVERYTHING, Missing
from ._traces import Trace, load_trace, record

OVERFLOW = FP16.max + 2.0**4
"""From here on magnitudes round to infinity: half a unit in the last place above the largest float16."""

_FLUSH = int(math.log2(FP16.flush_threshold))
_NORMAL = int(math.log2(FP16.smallest_normal))


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a schedule did over a trace."""

    scales: list[float]
    """The scale in use, by step."""
    skipped: list[int]
    """The steps that were skipped."""
    flushed_entries: int
    """Non-zero gradients that became zero, over the steps not skipped."""
    nonzero_entries: int
    """Non-zero gradients of these steps."""

    @property
    def flushed(self) -> float:
        """The share of non-zero gradients that became zero, in [0, 1], over the steps not skipped; 0 without any."""
        return self.flushed_entries / self.nonzero_entries if self.nonzero_entries else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Every figure, in types that JSON takes; the scale by step as [log2 of it, for how many steps] pairs."""
        return {
            "skips": len(self.skipped),
            "skipped": self.skipped,
            "flushed": self.flushed,
            "flushed entries": self.flushed_entries,
            "non-zero entries": self.nonzero_entries,
            "log2 scale, steps": [[log2, len(list(run))] for log2, run in groupby(map(math.log2, self.scales))],
        }


def replay(trace: Trace, scale: LossScale) -> Replay:
    """Run `scale` over `trace`, from the scale it stands at; it learns, so give each replay one of its own.

    Raises `ValueError` when the scale leaves the powers of two, at which alone a trace tells what float16 flushes.
    """
    cpu = torch.device("cpu")
    scales: list[float] = []
    skipped: list[int] = []
    flushed = nonzero = 0
    present = trace.counts.sum(axis=1)
    for step in range(len(trace)):
        used = float(scale.current(cpu))
        exponent = math.log2(used)
        if not exponent.is_integer():
            raise ValueError(f"a replay knows powers of two only, and the scale of step {step} is {used!r}")
        scales.append(used)
        bad = overflows(trace, step, used)
        lost, low = below(trace, step, int(exponent))
        if bad:
            skipped.append(step)
        else:
            flushed, nonzero = flushed + lost, nonzero + int(present[step])
        scale.after_step(torch.tensor(float(bad)), _reading(trace, step, used, bad, lost, low))
    return Replay(scales=scales, skipped=skipped, flushed_entries=flushed, nonzero_entries=nonzero)


def overflows(trace: Trace, step: int, scale: float) -> bool:
    """Whether a gradient, of a weight or an activation, is not finite in float16 at that scale."""
    largest = np.maximum(np.float64(trace.weights[step]), np.float64(trace.activations[step]))  # nan stays nan
    return not largest * scale < OVERFLOW


def below(trace: Trace, step: int, exponent: int) -> tuple[int, int]:
    """How many non-zero entries are zero, and how many subnormal, in float16 at the scale 2**exponent.

    The former is exact. Of the latter, those within 2**-25 of the smallest normal number round up to it, or are it,
    and are counted all the same.
    """
    counts = trace.counts[step]
    flushed, subnormal = (max(0, end - exponent - trace.first + 1) for end in (_FLUSH, _NORMAL))
    return int(counts[:flushed].sum()), int(counts[flushed:subnormal].sum())


def _reading(trace: Trace, step: int, scale: float, bad: bool, flushed: int, subnormal: int) -> Reading:
    """What `preamp.kernels.read` would find; the norm is not known, and no schedule asks for it."""
    largest = float(trace.weights[step]) * scale
    rounded = float(np.float16(largest)) if largest < OVERFLOW else math.inf
    found = torch.tensor(float(bad))
    return Reading(
        found=found,
        norm=torch.tensor(math.nan),
        nonfinite=found.bool().reshape(1),
        entries=trace.entries,
        amax=torch.tensor(rounded),
        subnormals=torch.tensor(float(subnormal)),
        zeros=torch.tensor(float(trace.zeros[step] + flushed)),
    )


# -- the suite

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
            "name": f"{self.task}, {self.start}",
            "task": self.task,
            "start": self.start,
            "seeds": len(next(iter(self.replays.values()))),
            "log2 largest scale": [round(value, 1) for value in self.largest],
            "contenders": [{"name": name, **_summary(replays)} for name, replays in self.replays.items()],
        }


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
        for start in missing.of(STARTS, lambda start, task=task: f"{task}, {start}"):  # type: ignore[misc]
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
