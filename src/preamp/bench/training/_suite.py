"""The suite itself: its parts in groups, within a time by its own clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from .._results import EVERYTHING, Missing
from ._contenders import Contender, fitting, fitting_compiled
from ._largest import batch_row
from ._measure import Clock, Pace, Speeds, Tell, heat, quiet
from ._optimizer import LISTS_BY_SIZE, optimizer_row, speeds
from ._parity import parity_row
from ._parts import Part, device_for_parts, groups_named, needs_by_group, run_parts, size_named
from ._rows import TrainingRow
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


GROUPS = ("lists", "eager", "compiled", "parity")
"""Of parts, as they can be asked for."""


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
    asked = groups_named("training", GROUPS, parts)
    size, chosen = size_named("training", SIZES, size, device)
    device = device_for_parts(device)
    clock = Clock(budget if budget is not None else chosen.budget, now)
    every = _parts(device, min(rounds, chosen.pace.rounds), size, clock, contenders, tell)
    yield from run_parts(every, asked, device, clock, missing, tell)


def estimates() -> dict[str, float]:
    """Seconds that each group of parts takes in the full size, by the estimate of its parts, on an H100."""
    return needs_by_group(_parts(torch.device("cpu"), SIZES["full"].pace.rounds, "full", Clock(BUDGET), None, quiet))


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
        return Part(kind="optimizer", group="lists", name=title, needs=needs, make=make)

    def steps(key: str, needs: float) -> Part:
        work = every[key]

        def make() -> TrainingRow:
            chosen_ones = contenders if contenders is not None else fitting(work)
            return heat("steps", work, chosen_ones, device, pace, clock, found(), chosen.reserve, tell=tell)

        return Part(kind="steps", group="eager", name=work.name, needs=needs, make=make)

    def compiled(key: str, needs: float) -> Part:
        work = every[key]
        name = f"{work.name}, compiled"

        def make() -> TrainingRow:
            torch.compiler.reset()  # entries of other works would be looked through at every call
            ones = contenders if contenders is not None else fitting_compiled(work)
            return heat("compiled", work, ones, device, pace, clock, found(), chosen.reserve_compiled, name, tell)

        return Part(kind="compiled", group="compiled", name=name, needs=needs, make=make)

    def parity(key: str, needs: float) -> Part:
        work = every[key]
        return Part(
            kind="parity", group="parity", name=f"parity, {work.name}", needs=needs,
            make=lambda: parity_row(work, device, chosen.parity_steps, clock, chosen.reserve, tell),
        )  # fmt: skip

    def batches(key: str, needs: float) -> Part:
        work = every[key]
        sizes = range(8, 64, 8) if size == "full" else range(1, 4)
        return Part(
            kind="largest batch", group="eager", name=f"largest batch, {work.name}", needs=needs,
            make=lambda: batch_row(work, device, clock, sizes, tell=tell),
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
    return [replace(part, needs=0) for part in parts]
