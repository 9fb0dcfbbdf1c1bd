"""A suite in parts, within a time: what can be asked for, what is dropped, what is done when a part fails."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from ...errors import PolicyError
from .._machine import DeviceLost, check_device
from .._results import EVERYTHING, Missing, Row, described, failure
from ._contenders import PARITY, Contender
from ._largest import SEARCHED, Fits, batch_row
from ._measure import Clock, Pace, Run, Tell, free_memory, quiet, steps_row
from ._parity import parity_row
from ._rows import lines
from ._works import Work, works


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a suite; it is dropped when less than `needs` seconds are left."""

    kind: str
    name: str
    needs: float
    make: Callable[[], Row]
    group: str = ""
    """Under which it can be asked for; without one it is measured first, whatever is asked for."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large everything is."""

    pace: Pace
    budget: float
    """Seconds that the suite may take."""
    parity_steps: int
    reserve: float
    """Seconds that a contender has to have left to begin."""
    reserve_compiled: float
    """The same for one that has to be compiled first."""


@dataclass(kw_only=True)
class SuiteRun(Run):
    """A run of a size, and the parts that suites share. `needs` of a part is an estimate for the full size."""

    name: str
    """The size's: "full" or "tiny"."""
    size: Size
    works: Mapping[str, Work]

    def steps(
        self, group: str, key: str, needs: float, contenders: Sequence[Contender], *, compiled: bool = False
    ) -> Part:
        """Whole steps of a work, as they are written or compiled."""
        work, kind, reserve = self.works[key], "steps", self.size.reserve
        name = work.name
        if compiled:
            kind, name, reserve = "compiled", f"{name}, compiled", self.size.reserve_compiled
        make = partial(steps_row, self, kind, work, contenders, reserve, name)
        return Part(kind=kind, group=group, name=name, needs=needs, make=make)

    def parity(
        self, group: str, key: str, needs: float, contenders: Sequence[Contender] = PARITY, part: str = "parity"
    ) -> Part:
        """Losses of a work at equal steps."""
        work, size = self.works[key], self.size
        make = partial(parity_row, self, part, work, size.parity_steps, contenders, size.reserve)
        return Part(kind=part, group=group, name=f"{part}, {work.name}", needs=needs, make=make)

    def largest_batch(
        self, group: str, key: str, needs: float, sizes: Sequence[int], contenders: Sequence[Contender] = SEARCHED,
        fits: Fits | None = None,
    ) -> Part:  # fmt: skip
        """The largest batch of a work that trains."""
        work = self.works[key]
        make = partial(batch_row, self, work, sizes, contenders, fits)
        return Part(kind="largest batch", group=group, name=f"largest batch, {work.name}", needs=needs, make=make)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A suite in parts. `groups` of parts can be asked for; `parts` makes all parts of a run."""

    name: str
    sizes: Mapping[str, Size]
    groups: Collection[str]
    parts: Callable[[SuiteRun], list[Part]]

    def __call__(
        self,
        device: torch.device,
        rounds: int,
        tell: Tell,
        *,
        size: str | None = None,
        budget: float | None = None,
        parts: Collection[str] | None = None,
        missing: Missing = EVERYTHING,
        now: Callable[[], float] = time.monotonic,
    ) -> Iterator[Row]:
        """Train by every contender, in parts, and give the row of each; see `Part` for what happens when time runs out.

        `rounds`: as many as asked for, but no more than the size has. `size`: "full" (the default on CUDA) or "tiny".
        `budget`: seconds, by `now`. `parts`: of which groups, else of all; what belongs to no group is measured first,
        for the rest is held against it. A device that is lost ends the suite with `DeviceLost`, after the row.
        """
        run = self.run(device, size, rounds, tell, budget, now)
        if unknown := [group for group in parts or () if group not in self.groups]:
            raise PolicyError(
                f"the suite {self.name} has no part {unknown[0]!r}; its parts are {', '.join(self.groups)}"
            )
        every = self.parts(run)
        wanted = [part for part in every if part.group in (self.groups if parts is None else parts)]
        always = [part for part in every if not part.group and missing.any(wanted, lambda part: part.name)]
        with _settings():
            for part in itertools.chain(always, missing.of(wanted, lambda part: part.name)):
                row = run_part(part if run.name == "full" else replace(part, needs=0), run.clock, run.tell)
                row.about["size"] = run.name
                lost = _lost(row, run.device)
                yield row
                if lost is not None:
                    raise lost

    def run(
        self, device: torch.device, size: str | None = "full", rounds: int = 99, tell: Tell = quiet,
        budget: float | None = None, now: Callable[[], float] = time.monotonic,
    ) -> SuiteRun:  # fmt: skip
        """A run whose clock begins now: of the size "full" on CUDA and "tiny" elsewhere if none is asked for."""
        name = size or ("full" if device.type == "cuda" else "tiny")
        if name not in self.sizes:
            raise PolicyError(f"the suite {self.name} has no size {name!r}; write {' or '.join(self.sizes)}")
        chosen = self.sizes[name]
        pace = replace(chosen.pace, rounds=min(rounds, chosen.pace.rounds))
        clock = Clock(chosen.budget if budget is None else budget, now)
        return SuiteRun(
            name=name, size=chosen, device=_ready(device), works=works(name), tell=tell, pace=pace, clock=clock
        )

    def estimates(self) -> dict[str, float]:
        """Seconds that each group takes in the full size on an H100, with the parts that belong to none."""
        parts = self.parts(self.run(torch.device("cpu")))
        return {group: sum(part.needs for part in parts if part.group in (group, "")) for group in self.groups}


def _ready(device: torch.device) -> torch.device:
    """The device with its number; also prepares the profiler."""
    if device.type != "cuda":
        return device
    # the profiler, started again while CUDA graphs are about, must not have been shut down in between
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def run_part(part: Part, clock: Clock, tell: Tell) -> Row:
    """The row of a part, with the time it took: measured, dropped or failed."""
    if clock.left < part.needs:
        why = f"{clock.spent}, and it needs about {part.needs:.0f} s"
        row = Row(part=part.kind, name=part.name, about={"dropped": why})
    else:
        tell(f"{part.name} ({clock.spent})")
        started = clock.used
        try:
            row = part.make()
        except Exception as error:
            row = Row(part=part.kind, name=part.name, about={"error": failure(part.name, error, tell)})
        row.about["took"] = round(clock.used - started, 2)
    for line in lines(row):
        tell(line)
    return row


def _lost(row: Row, device: torch.device) -> DeviceLost | None:
    """The end of the device if it did not survive this row, which then says so."""
    errors = [
        row.about.get("error"),
        *(f"{each['name']}: {each['error']}" for each in row.contenders if each.get("error")),
    ]
    try:
        if any(errors):
            check_device(device, f"{row.name}: {next(filter(None, errors))}")
        free_memory()
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
