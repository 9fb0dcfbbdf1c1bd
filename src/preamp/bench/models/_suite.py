"""The suite itself: who competes on seven networks, and what is measured, in groups that fit in a call each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ..training._contenders import BF16, O2, O5_EIGHT, O5_SPLIT, REFERENCE, Contender
from ..training._largest import Fits, net_row
from ..training._parity import FP32
from ..training._parts import Part, Size, Suite, SuiteRun
from ..training._suite import SIZES as TRAINING_SIZES
from ..training._works import Work

TF32 = Contender(name="tf32")
AMP_BF16 = Contender(name="torch.amp bf16", dtype=BF16)
O1, O4, O5 = (Contender(name=f"preamp {level}", level=level) for level in ("O1", "O4", "O5"))

EAGER: tuple[Contender, ...] = (REFERENCE, O2, AMP_BF16, O5, TF32, FP32, O1, O4, O5_EIGHT)

COMPILED: tuple[Contender, ...] = tuple(
    replace(contender, name=f"{contender.name}, compiled", compiled=True)
    for contender in (REFERENCE, O2, AMP_BF16, O5, TF32, O1, O4, FP32)
)
"""Without 8-bit states, which are the optimizer's, and that is not compiled."""

LOSSES: tuple[Contender, ...] = (REFERENCE, O2, AMP_BF16, O5, O1, O4, TF32, O5_EIGHT)
"""Against fp32, which every such row begins with."""

BATCHES: tuple[Contender, ...] = (REFERENCE, O2, O5_EIGHT, O5, FP32)
NETS: tuple[Contender, ...] = (REFERENCE, O2, O5, O5_SPLIT, O5_EIGHT)


def fitting(contenders: tuple[Contender, ...], work: Work) -> list[Contender]:
    """Those that say something about a work: SGD has no states for 8 bits, and no split masters."""
    return [each for each in contenders if work.optimizer != "SGD" or not (each.eight_bit or each.split)]


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


def parts_of(run: SuiteRun, fits: Fits | None = None) -> list[Part]:
    """Network by network in each group; `fits` stands for trying whether something fits."""

    def of(contenders: tuple[Contender, ...], network: Network) -> list[Contender]:
        return fitting(contenders, run.works[network.key])

    def sizes(step: int) -> range:
        step = step if run.name == "full" else 1
        return range(step, (PROBED + 1) * step, step)

    def deeper(network: Network) -> Part:
        work = run.works[network.key]
        count, contenders = max(work.count // 4, 1), of(NETS, network)
        make = partial(net_row, run, work, count, sizes(network.layers), contenders, fits)
        name = f"larger net, {work.name}"
        return Part(kind="larger net", group=MEMORY_GROUP, name=name, needs=network.deeper, make=make)

    def batches(network: Network) -> Part:
        tried = sizes(network.batches)
        return run.largest_batch(MEMORY_GROUP, network.key, network.memory, tried, of(BATCHES, network), fits)

    def compiled(network: Network) -> Part:
        group = next(group for group, keys in COMPILED_GROUPS.items() if network.key in keys)
        return run.steps(group, network.key, network.compiled, of(COMPILED, network), compiled=True)

    return [
        *(run.steps(EAGER_GROUP, network.key, network.eager, of(EAGER, network)) for network in NETWORKS),
        *(deeper(network) for network in NETWORKS if network.layers),
        *(batches(network) for network in NETWORKS),
        *(run.parity(LOSSES_GROUP, n.key, n.losses, of(LOSSES, n), "losses") for n in NETWORKS),
        *(compiled(network) for network in NETWORKS),
    ]


models = Suite(name="models", sizes=SIZES, groups=GROUPS, parts=parts_of)
