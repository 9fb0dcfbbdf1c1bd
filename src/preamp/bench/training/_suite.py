"""The suite itself: its parts in the order of their worth, within a time by its own clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from ...errors import PolicyError
from ._contenders import COMPILED, EAGER, Contender, fitting
from ._measure import Clock, Pace, Speeds, described, free, heat
from ._optimizer import LISTS_BY_SIZE, optimizer_row, speeds
from ._parity import batch_row, parity_row
from ._rows import TrainingRow, lines
from ._works import works

BUDGET = 540.0
"""Seconds that the full size may take: the protocol's ten minutes less a minute for what is around it."""


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
        pace=Pace(rounds=3, steps=20, seconds=1.2, warm_up=5), budget=BUDGET, parity_steps=300,
        reserve=12.0, reserve_compiled=45.0,
    ),
    "tiny": Size(
        pace=Pace(rounds=2, steps=2, seconds=0.05, warm_up=5, backend="eager"), budget=60.0, parity_steps=6,
        reserve=0.0, reserve_compiled=0.0,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of the suite; it is dropped when less than `needs` seconds are left, or after `latest` of the budget."""

    kind: str
    name: str
    needs: float
    make: Callable[[], TrainingRow]
    latest: float = 1.0


def training(
    device: torch.device,
    rounds: int,
    tell: Callable[[str], None],
    *,
    size: str | None = None,
    budget: float | None = None,
    keep: Callable[[Sequence[TrainingRow]], None] = lambda rows: None,
    now: Callable[[], float] = time.monotonic,
    contenders: Sequence[Contender] | None = None,
) -> list[TrainingRow]:
    """Train by every contender, in parts; see `Part` for what happens when the time runs out.

    `rounds`: as many as asked for, but no more than the size has. `size`: "full" (the default on CUDA) or "tiny".
    `budget`: seconds, by `now`. `keep` gets all rows so far after each, for whoever writes them down: a run that is
    killed leaves what it measured. `contenders`: in place of those of the protocol, the first being the reference.
    """
    size = size or ("full" if device.type == "cuda" else "tiny")
    if size not in SIZES:
        raise PolicyError(f"the suite training has no size {size!r}; write {' or '.join(SIZES)}")
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        # the profiler, started again while CUDA graphs are about, must not have been shut down in between
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    chosen = SIZES[size]
    clock = Clock(budget if budget is not None else chosen.budget, now)
    rows: list[TrainingRow] = []
    with _settings():
        for part in _parts(device, min(rounds, chosen.pace.rounds), size, clock, contenders):
            row = _run(part, clock, tell)
            rows.append(row)
            for line in lines(row):
                tell(line)
            keep(rows)
    return rows


def _run(part: Part, clock: Clock, tell: Callable[[str], None]) -> TrainingRow:
    late = clock.used > part.latest * clock.budget
    if late or clock.left < part.needs:
        why = f"{clock.used:.0f} s of {clock.budget:.0f} s were used, and it needs about {part.needs:.0f} s"
        return TrainingRow(part=part.kind, name=part.name, about={"dropped": why})
    tell(f"{part.name} ({clock.used:.0f} s of {clock.budget:.0f} s used)")
    started = clock.used
    try:
        row = part.make()
    except Exception as error:
        row = TrainingRow(part=part.kind, name=part.name, about={"error": described(error)})
    free()
    row.about["took"] = round(clock.used - started, 2)
    return row


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
    device: torch.device, rounds: int, size: str, clock: Clock, contenders: Sequence[Contender] | None
) -> list[Part]:
    """In the order of what they are worth. `needs` are estimates for an H200, and 0 for the tiny size."""
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
            return optimizer_row(name, device, 5 * rounds, found(), clip=clip)

        title = f"Adam, {name}" + ("" if clip is None else ", clipping")
        return Part(kind="optimizer", name=title, needs=needs, make=make)

    def steps(key: str, needs: float) -> Part:
        work = every[key]

        def make() -> TrainingRow:
            chosen_ones = contenders if contenders is not None else fitting(EAGER, work)
            return heat("steps", work, chosen_ones, device, pace, clock, found(), chosen.reserve)

        return Part(kind="steps", name=work.name, needs=needs, make=make)

    def compiled(key: str, needs: float, latest: float = 1.0) -> Part:
        work = every[key]
        name = f"{work.name}, compiled"

        def make() -> TrainingRow:
            torch.compiler.reset()  # entries of other works would be looked through at every call
            ones = contenders if contenders is not None else COMPILED
            return heat("compiled", work, ones, device, pace, clock, found(), chosen.reserve_compiled, name)

        return Part(kind="compiled", name=name, needs=needs, make=make, latest=latest)

    def parity(key: str, needs: float) -> Part:
        work = every[key]
        return Part(
            kind="parity", name=f"parity, {work.name}", needs=needs,
            make=lambda: parity_row(work, device, chosen.parity_steps, clock, chosen.reserve),
        )  # fmt: skip

    def batches(key: str, needs: float, latest: float) -> Part:
        work = every[key]
        sizes = range(8, 64, 8) if size == "full" else range(1, 4)
        return Part(
            kind="largest batch", name=f"largest batch, {work.name}", needs=needs, latest=latest,
            make=lambda: batch_row(work, device, clock, sizes=sizes),
        )  # fmt: skip

    first, *others = LISTS_BY_SIZE[size]
    parts = [
        Part(kind="machine", name="machine", needs=5, make=machine),
        optimizer(first, 15),
        optimizer(first, 10, clip=1.0),
        steps("feed-forward", 15),
        steps("bert-base b4", 20),
        steps("bert-base b32", 25),
        steps("bert-large", 45),
        steps("unet", 30),
        compiled("bert-base b32", 75),
        steps("resnet", 35),
        parity("bert-base b32", 45),
        parity("unet", 35),
        compiled("bert-large", 90),
        compiled("unet", 75),
        *(optimizer(name, 15) for name in others),
        batches("bert-large", 30, latest=0.85),
        compiled("resnet", 90, latest=0.74),
    ]
    if size == "full":
        return parts
    return [Part(kind=p.kind, name=p.name, needs=0, make=p.make, latest=p.latest) for p in parts]
