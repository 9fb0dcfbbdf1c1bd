"""The suite itself: its parts in groups, within a time by its own clock."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from ...errors import PolicyError
from .._machine import DeviceLost, check_device
from .._results import EVERYTHING, Missing, described, failure
from ._contenders import Contender, fitting, fitting_compiled
from ._measure import Clock, Pace, Speeds, Tell, free, heat, quiet
from ._optimizer import LISTS_BY_SIZE, optimizer_row, speeds
from ._parity import batch_row, parity_row
from ._rows import TrainingRow, lines
from ._works import works

BUDGET = 1500.0
"""Seconds that the full size may take: all that its parts need, by their estimates, and a quarter more."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large everything is."""

    pace: Pace
    budget: float
    parity_steps: int
    reserve: float
    """Seconds that a contender has to have left to begin."""
    reserve_compiled: float
    """The same for one that has to be compiled first."""


SIZES = {
    "full": Size(
        pace=Pace(rounds=7, steps=10, seconds=0.6, warm_up=5), budget=BUDGET, parity_steps=300,
        reserve=12.0, reserve_compiled=45.0,
    ),
    "tiny": Size(
        pace=Pace(rounds=2, steps=2, seconds=0.05, warm_up=5, backend="eager"), budget=60.0, parity_steps=6,
        reserve=0.0, reserve_compiled=0.0,
    ),
}  # fmt: skip


GROUPS = {"optimizer": "lists", "steps": "eager", "largest batch": "eager", "compiled": "compiled", "parity": "parity"}
"""By kind of part, the group of parts that can be asked for."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of the suite, of a kind in `GROUPS`; it is dropped when less than `needs` seconds are left."""

    kind: str
    name: str
    needs: float
    make: Callable[[], TrainingRow]


def training(
    device: torch.device,
    rounds: int,
    tell: Callable[[str], None],
    *,
    size: str | None = None,
    budget: float | None = None,
    parts: Collection[str] | None = None,
    missing: Missing = EVERYTHING,
    now: Callable[[], float] = time.monotonic,
    contenders: Sequence[Contender] | None = None,
) -> Iterator[TrainingRow]:
    """Train by every contender, in parts, and give the row of each; see `Part` for what happens when time runs out.

    `rounds`: as many as asked for, but no more than the size has. `size`: "full" (the default on CUDA) or "tiny".
    `budget`: seconds, by `now`. `parts`: of which groups (`GROUPS`), else of all; what the machine can do is measured
    first, for the rest is held against it. `contenders`: in place of those of the protocol, the first being the
    reference. A device that is lost ends the suite with `DeviceLost`, after the row.
    """
    size = size or ("full" if device.type == "cuda" else "tiny")
    if size not in SIZES:
        raise PolicyError(f"the suite training has no size {size!r}; write {' or '.join(SIZES)}")
    groups = dict.fromkeys(GROUPS.values())
    if unknown := [part for part in parts or () if part not in groups]:
        raise PolicyError(f"the suite training has no part {unknown[0]!r}; its parts are {', '.join(groups)}")
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        # the profiler, started again while CUDA graphs are about, must not have been shut down in between
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    chosen = SIZES[size]
    clock = Clock(budget if budget is not None else chosen.budget, now)
    machine, *others = _parts(device, min(rounds, chosen.pace.rounds), size, clock, contenders, tell)
    wanted = [part for part in others if parts is None or GROUPS[part.kind] in parts]
    with _settings():
        needed = missing.of(wanted, lambda part: part.name)
        for part in itertools.chain([machine] if missing.any(wanted, lambda part: part.name) else [], needed):
            row = _run(part, clock, tell)
            lost = _lost(row, device)
            yield row
            if lost is not None:
                raise lost


def estimates() -> dict[str, float]:
    """Seconds that each group of parts takes in the full size, by the estimate of its parts, on an H100."""
    parts = _parts(torch.device("cpu"), SIZES["full"].pace.rounds, "full", Clock(BUDGET), None, quiet)
    return {group: sum(p.needs for p in parts if GROUPS.get(p.kind, group) == group) for group in GROUPS.values()}


def _run(part: Part, clock: Clock, tell: Callable[[str], None]) -> TrainingRow:
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


def _parts(
    device: torch.device, rounds: int, size: str, clock: Clock, contenders: Sequence[Contender] | None, tell: Tell
) -> list[Part]:
    """The machine first. `needs` are estimates for an H100, with what has to be compiled, and 0 for the tiny size."""
    chosen, every = SIZES[size], works(size)
    pace = Pace(**{**asdict(chosen.pace), "rounds": rounds})
    measured: list[Speeds] = []

    def found() -> Speeds | None:
        return measured[0] if measured else None

    def machine() -> TrainingRow:
        about: dict[str, object] = {"size": size, "device": device.type}
        measured.append(speeds(device, size))
        about |= {"copy bytes a second": measured[0].copy, "bfloat16 operations a second": measured[0].product}
        return TrainingRow(part="machine", name="machine", what="best copy and product", about=about)

    def optimizer(name: str, needs: float, clip: float | None = None) -> Part:
        def make() -> TrainingRow:
            return optimizer_row(name, device, 5 * rounds, found(), clip=clip, tell=tell)

        title = f"Adam, {name}" + ("" if clip is None else ", clipping")
        return Part(kind="optimizer", name=title, needs=needs, make=make)

    def steps(key: str, needs: float) -> Part:
        work = every[key]

        def make() -> TrainingRow:
            chosen_ones = contenders if contenders is not None else fitting(work)
            return heat("steps", work, chosen_ones, device, pace, clock, found(), chosen.reserve, tell=tell)

        return Part(kind="steps", name=work.name, needs=needs, make=make)

    def compiled(key: str, needs: float) -> Part:
        work = every[key]
        name = f"{work.name}, compiled"

        def make() -> TrainingRow:
            torch.compiler.reset()  # entries of other works would be looked through at every call
            ones = contenders if contenders is not None else fitting_compiled(work)
            return heat("compiled", work, ones, device, pace, clock, found(), chosen.reserve_compiled, name, tell)

        return Part(kind="compiled", name=name, needs=needs, make=make)

    def parity(key: str, needs: float) -> Part:
        work = every[key]
        return Part(
            kind="parity", name=f"parity, {work.name}", needs=needs,
            make=lambda: parity_row(work, device, chosen.parity_steps, clock, chosen.reserve, tell),
        )  # fmt: skip

    def batches(key: str, needs: float) -> Part:
        work = every[key]
        sizes = range(8, 64, 8) if size == "full" else range(1, 4)
        return Part(
            kind="largest batch", name=f"largest batch, {work.name}", needs=needs,
            make=lambda: batch_row(work, device, clock, sizes=sizes, tell=tell),
        )  # fmt: skip

    first, *others = LISTS_BY_SIZE[size]
    parts = [
        Part(kind="machine", name="machine", needs=5, make=machine),
        optimizer(first, 35),
        optimizer(first, 35, clip=1.0),
        *(optimizer(name, 25) for name in others),
        steps("feed-forward", 25),
        steps("bert-base b4", 45),
        steps("bert-base b32", 50),
        steps("bert-large", 90),
        steps("unet", 75),
        steps("resnet", 95),
        batches("bert-large", 35),
        compiled("bert-base b32", 110),
        compiled("bert-base b4", 65),
        compiled("feed-forward", 35),
        compiled("bert-large", 95),
        compiled("unet", 60),
        compiled("resnet", 70),
        parity("bert-base b32", 85),
        parity("unet", 60),
    ]
    if size == "full":
        return parts
    return [Part(kind=p.kind, name=p.name, needs=0, make=p.make) for p in parts]
