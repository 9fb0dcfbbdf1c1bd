"""A suite in parts, within a time: what can be asked for, what is dropped, what is done when a part fails."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from ...errors import PolicyError
from .._machine import DeviceLost, check_device
from .._results import Missing, described, failure
from ._measure import Clock, Tell, free
from ._rows import TrainingRow, lines

S = TypeVar("S")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a suite; it is dropped when less than `needs` seconds are left."""

    kind: str
    name: str
    needs: float
    make: Callable[[], TrainingRow]
    group: str = ""
    """Under which it can be asked for; without one it is measured first, whatever is asked for."""


def size_named(suite: str, sizes: Mapping[str, S], size: str | None, device: torch.device) -> tuple[str, S]:
    """A size by name, "full" on CUDA and "tiny" elsewhere if none is asked for."""
    size = size or ("full" if device.type == "cuda" else "tiny")
    if size not in sizes:
        raise PolicyError(f"the suite {suite} has no size {size!r}; write {' or '.join(sizes)}")
    return size, sizes[size]


def groups_named(suite: str, groups: Collection[str], asked: Collection[str] | None) -> Collection[str]:
    """Groups of parts by name, all of them if none is asked for."""
    if unknown := [part for part in asked or () if part not in groups]:
        raise PolicyError(f"the suite {suite} has no part {unknown[0]!r}; its parts are {', '.join(groups)}")
    return groups if asked is None else asked


def device_for_parts(device: torch.device) -> torch.device:
    """The device with its number, and the profiler told what it has to know before it begins."""
    if device.type != "cuda":
        return device
    # the profiler, started again while CUDA graphs are about, must not have been shut down in between
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def run_parts(
    parts: Sequence[Part], asked: Collection[str], device: torch.device, clock: Clock, missing: Missing, tell: Tell
) -> Iterator[TrainingRow]:
    """The row of each part that is missing, of the groups asked for. A lost device ends it after its row."""
    always = [part for part in parts if not part.group]
    wanted = [part for part in parts if part.group in asked]
    with _settings():
        needed = missing.of(wanted, lambda part: part.name)
        for part in itertools.chain(always if missing.any(wanted, lambda part: part.name) else [], needed):
            row = run_part(part, clock, tell)
            lost = _lost(row, device)
            yield row
            if lost is not None:
                raise lost


def run_part(part: Part, clock: Clock, tell: Tell) -> TrainingRow:
    """The row of a part, with the time it took: measured, dropped or failed."""
    if clock.left < part.needs:
        why = f"{clock.spent}, and it needs about {part.needs:.0f} s"
        row = TrainingRow(part=part.kind, name=part.name, about={"dropped": why})
    else:
        tell(f"{part.name} ({clock.spent})")
        started = clock.used
        try:
            row = part.make()
        except Exception as error:
            row = TrainingRow(part=part.kind, name=part.name, about={"error": failure(part.name, error, tell)})
        row.about["took"] = round(clock.used - started, 2)
    for line in lines(row):
        tell(line)
    return row


def needs_by_group(parts: Sequence[Part]) -> dict[str, float]:
    """Seconds that each group takes by the estimates of its parts, with those that belong to none."""
    groups = dict.fromkeys(part.group for part in parts if part.group)
    return {group: sum(part.needs for part in parts if part.group in (group, "")) for group in groups}


def _lost(row: TrainingRow, device: torch.device) -> DeviceLost | None:
    """The end of the device if it did not survive this row, which then says so."""
    errors = [
        row.about.get("error"),
        *(f"{each['name']}: {each['error']}" for each in row.contenders if each.get("error")),
    ]
    try:
        if any(errors):
            check_device(device, f"{row.name}: {next(filter(None, errors))}")
        free()
    except DeviceLost as lost:
        row.about["error"] = described(lost)
        return lost
    return None


@contextmanager
def _settings() -> Iterator[None]:
    """What contenders set for the process is put back; cuDNN may look for the quickest convolutions meanwhile."""
    if not torch.cuda.is_available():
        yield
        return
    precision, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    benchmark = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = tf32
