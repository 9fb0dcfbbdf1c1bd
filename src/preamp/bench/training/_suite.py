"""The suite itself: its parts in groups, within a time by its own clock."""

from __future__ import annotations

from collections.abc import Sequence

from .._results import Row
from ._contenders import Contender, fitting, fitting_compiled
from ._measure import Pace
from ._optimizer import LISTS_BY_SIZE, optimizer_row, speeds
from ._parts import Part, Size, Suite, SuiteRun

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


def parts_of(run: SuiteRun, contenders: Sequence[Contender] | None = None) -> list[Part]:
    """The machine first. `needs` are estimates for an H100, with what has to be compiled.

    `contenders`: in place of those of the protocol, the first being the reference.
    """

    def machine() -> Row:
        run.speeds = speeds(run.device, run.name)
        about: dict[str, object] = {"size": run.name, "device": run.device.type}
        about |= {"copy bytes a second": run.speeds.copy, "bfloat16 operations a second": run.speeds.product}
        return Row(part="machine", name="machine", what="best copy and product", about=about)

    def optimizer(name: str, needs: float, clip: float | None = None) -> Part:
        def make() -> Row:
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


training = Suite(name="training", sizes=SIZES, groups=("lists", "eager", "compiled", "parity"), parts=parts_of)
