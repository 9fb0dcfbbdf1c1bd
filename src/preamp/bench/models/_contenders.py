"""Who competes in the suite `models`: float32, TF32, torch.amp and preamp's levels, in the order of what they tell."""

from __future__ import annotations

from dataclasses import replace

from ..training._contenders import BF16, O2, O5_EIGHT, O5_SPLIT, REFERENCE, Contender
from ..training._parity import FP32
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
