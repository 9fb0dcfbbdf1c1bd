"""The suite itself: seven networks, and for each what is measured, in groups of parts that fit in a call each."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import torch

from .._results import EVERYTHING, Missing
from ..training._largest import Fits, batch_row, net_row
from ..training._measure import Clock, Tell, heat, quiet
from ..training._parity import parity_row
from ..training._parts import Part, device_for_parts, groups_named, needs_by_group, run_parts, size_named
from ..training._rows import TrainingRow
from ..training._suite import SIZES as TRAINING_SIZES
from ..training._suite import Size
from ..training._works import works
from ._contenders import BATCHES, COMPILED, EAGER, LOSSES, NETS, fitting

SIZES: dict[str, Size] = {
    "full": replace(TRAINING_SIZES["full"], budget=3000.0, parity_steps=100),
    "tiny": replace(TRAINING_SIZES["tiny"], budget=300.0),
}
"""Those of the suite `training`; the budget is what all parts need, by their estimates, and a little more."""

EAGER_GROUP, LOSSES_GROUP, MEMORY_GROUP = "models", "models-losses", "models-memory"
COMPILED_GROUPS = {
    "models-compiled": ("feed-forward", "bert-base b32", "gpt"),
    "models-compiled-large": ("bert-large",),
    "models-compiled-images": ("unet", "resnet"),
    "models-compiled-grouped": ("se-resnext",),
}
"""By key, the networks of each: what is compiled in one call."""

GROUPS = (EAGER_GROUP, LOSSES_GROUP, MEMORY_GROUP, *COMPILED_GROUPS)
"""Of parts, as they can be asked for."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network by its key in `works`, and what its parts take on an H100 by estimate, in seconds, compiling included.

    `batches`, `layers`: steps between the sizes among which the largest that fits is looked for; 0 if it is not.
    """

    key: str
    eager: float
    compiled: float
    losses: float
    memory: float
    batches: int
    layers: int = 0
    deeper: float = 0.0


NETWORKS = (
    Network(key="feed-forward", eager=15, compiled=45, losses=5, memory=15, batches=2**17),
    Network(key="unet", eager=55, compiled=190, losses=25, memory=45, batches=16),
    Network(key="bert-base b32", eager=40, compiled=195, losses=40, memory=40, batches=32),
    Network(key="bert-large", eager=80, compiled=320, losses=130, memory=50, batches=4, layers=8, deeper=75),
    Network(key="se-resnext", eager=110, compiled=320, losses=130, memory=60, batches=32),
    Network(key="resnet", eager=75, compiled=235, losses=60, memory=50, batches=64),
    Network(key="gpt", eager=60, compiled=120, losses=60, memory=45, batches=2, layers=3, deeper=60),
)

PROBED = 15
"""Sizes, so that four tries decide."""


def models(
    device: torch.device,
    rounds: int,
    tell: Callable[[str], None],
    *,
    size: str | None = None,
    budget: float | None = None,
    parts: Collection[str] | None = None,
    missing: Missing = EVERYTHING,
    now: Callable[[], float] = time.monotonic,
    fits: Fits | None = None,
) -> Iterator[TrainingRow]:
    """Train seven networks at their real sizes by every contender, and give a row for each network and question.

    What it takes and how it ends is as for the suite `training`; the groups of parts are `GROUPS`. The first contender
    of a row is torch.amp in float16, compiled where the others are; images lie channels last for all. `fits` stands for
    trying whether something fits.
    """
    asked = groups_named("models", GROUPS, parts)
    size, chosen = size_named("models", SIZES, size, device)
    device = device_for_parts(device)
    clock = Clock(budget if budget is not None else chosen.budget, now)
    made = _parts(device, min(rounds, chosen.pace.rounds), size, clock, fits, tell)
    for row in run_parts(made, asked, device, clock, missing, tell):
        row.about["size"] = size
        yield row


def estimates() -> dict[str, float]:
    """Seconds that each group of parts takes in the full size, by the estimate of its parts, on an H100."""
    return needs_by_group(_parts(torch.device("cpu"), 7, "full", Clock(0.0), None, quiet))


def _parts(device: torch.device, rounds: int, size: str, clock: Clock, fits: Fits | None, tell: Tell) -> list[Part]:
    """Network by network in each group."""
    chosen, every = SIZES[size], works(size)
    pace = replace(chosen.pace, rounds=rounds)

    def eager(network: Network) -> Part:
        work = every[network.key]
        return Part(
            kind="steps", group=EAGER_GROUP, name=work.name, needs=network.eager,
            make=lambda: heat(
                "steps", work, fitting(EAGER, work), device, pace, clock, None, chosen.reserve, tell=tell
            ),
        )  # fmt: skip

    def losses(network: Network) -> Part:
        work = every[network.key]
        return Part(
            kind="losses", group=LOSSES_GROUP, name=f"losses, {work.name}", needs=network.losses,
            make=lambda: parity_row(
                work, device, chosen.parity_steps, clock, chosen.reserve, tell, fitting(LOSSES, work), "losses"
            ),
        )  # fmt: skip

    def batches(network: Network) -> Part:
        work, step = every[network.key], network.batches if size == "full" else 1
        return Part(
            kind="largest batch", group=MEMORY_GROUP, name=f"largest batch, {work.name}", needs=network.memory,
            make=lambda: batch_row(
                work, device, clock, _sizes(step), fitting(BATCHES, work), tell=tell, fits=fits
            ),
        )  # fmt: skip

    def deeper(network: Network) -> Part:
        work, step = every[network.key], network.layers if size == "full" else 1
        return Part(
            kind="larger net", group=MEMORY_GROUP, name=f"larger net, {work.name}", needs=network.deeper,
            make=lambda: net_row(
                work, max(work.count // 4, 1), device, clock, _sizes(step), fitting(NETS, work), tell=tell, fits=fits
            ),
        )  # fmt: skip

    def compiled(network: Network) -> Part:
        work = every[network.key]
        name = f"{work.name}, compiled"

        def make() -> TrainingRow:
            torch.compiler.reset()  # entries of other works would be looked through at every call
            ones = fitting(COMPILED, work)
            return heat("compiled", work, ones, device, pace, clock, None, chosen.reserve_compiled, name, tell)

        group = next(group for group, keys in COMPILED_GROUPS.items() if network.key in keys)
        return Part(kind="compiled", group=group, name=name, needs=network.compiled, make=make)

    parts = [
        *(eager(network) for network in NETWORKS),
        *(deeper(network) for network in NETWORKS if network.layers),
        *(batches(network) for network in NETWORKS),
        *(losses(network) for network in NETWORKS),
        *(compiled(network) for network in NETWORKS),
    ]
    return parts if size == "full" else [replace(part, needs=0) for part in parts]


def _sizes(step: int) -> range:
    return range(step, (PROBED + 1) * step, step)
