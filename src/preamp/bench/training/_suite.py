"""The suite itself: its parts in groups, within a time by its own clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from .._results import EVERYTHING, Missing
from ._contenders import Contender, fitting, fitting_compiled
from ._measure import Pace
from ._optimizer import LISTS_BY_SIZE, optimizer_row, speeds
from ._parts import Part, Run, Size, needs_by_group, run_suite
from ._rows import TrainingRow

BUDGET = 1500.0
"""Seconds that the full size may take: all that its parts need, by their estimates, and a quarter more."""

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
    contenders: Sequence[Contender] | None = None,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[TrainingRow]:
    """Train by every contender, in parts, and give the row of each; see `Part` for what happens when time runs out.

    `rounds`: as many as asked for, but no more than the size has. `size`: "full" (the default on CUDA) or "tiny".
    `budget`: seconds, by `now`. `parts`: of which groups (`GROUPS`), else of all; what the machine can do is measured
    first, for the rest is held against it. `contenders`: in place of those of the protocol, the first being the
    reference. A device that is lost ends the suite with `DeviceLost`, after the row.
    """
    run = Run.begun("training", SIZES, device, rounds, tell, size, budget, now)
    yield from run_suite(run, _parts(run, contenders), GROUPS, parts, missing)


def estimates() -> dict[str, float]:
    """Seconds that each group of parts takes in the full size, by the estimate of its parts, on an H100."""
    return needs_by_group(_parts(Run.imagined(SIZES), None))


def _parts(run: Run, contenders: Sequence[Contender] | None) -> list[Part]:
    """The machine first. `needs` are estimates for an H100, with what has to be compiled."""

    def machine() -> TrainingRow:
        run.speeds = speeds(run.device, run.name)
        about: dict[str, object] = {"size": run.name, "device": run.device.type}
        about |= {"copy bytes a second": run.speeds.copy, "bfloat16 operations a second": run.speeds.product}
        return TrainingRow(part="machine", name="machine", what="best copy and product", about=about)

    def optimizer(name: str, needs: float, clip: float | None = None) -> Part:
        def make() -> TrainingRow:
            return optimizer_row(name, run.device, 5 * run.pace.rounds, run.speeds, clip=clip, tell=run.tell)

        title = f"Adam, {name}" + ("" if clip is None else ", clipping")
        return Part(kind="optimizer", group="lists", name=title, needs=needs, make=make)

    def steps(key: str, needs: float) -> Part:
        return run.steps("eager", key, needs, contenders or fitting(run.works[key]))

    def compiled(key: str, needs: float) -> Part:
        return run.steps("compiled", key, needs, contenders or fitting_compiled(run.works[key]), compiled=True)

    batches = range(8, 64, 8) if run.name == "full" else range(1, 4)
    first, *others = LISTS_BY_SIZE[run.name]
    return [
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
        run.largest_batch("eager", "bert-large", 35, batches),
        compiled("bert-base b32", 110),
        compiled("bert-base b4", 65),
        compiled("feed-forward", 35),
        compiled("bert-large", 95),
        compiled("unet", 60),
        compiled("resnet", 70),
        run.parity("parity", "bert-base b32", 85),
        run.parity("parity", "unet", 60),
    ]
