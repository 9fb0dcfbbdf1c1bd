"""Moments of Adam in 8 bits: blocks of 256 elements in memory order, one float32 scale a block.

Block-wise scales are those of Dettmers, Lewis, Shleifer and Zettlemoyer 2022 (8-bit optimizers via block-wise
quantization). Their codes are nearest entries of a table; here they are powers in closed form, and chance decides:

    first moment   int8   c  means  sign(c) * (|c| / 127)^4 * scale
    second moment  uint8  c  means            (c / 255)^8  * scale

A quarter power needs two square roots, which every device rounds alike, and no table. The root of the second moment
has the same spacing as the first, and both reach far down: to 4e-9 of a block's largest first moment, and to 2e-10 of
the root of its largest second one.

By chance, because these are moving averages: a step changes a second moment by about a thousandth, and codes are 3 %
apart or more. Rounded to nearest, the moment of an element that falls silent in a block that does not would stay for
ever, and with it a step that is far too small; rounded by chance it is right in the mean.

A second moment above 0 never becomes 0, which beside a first moment that does not would make an enormous step: it
gets at least code 2, whose root is as far below the largest as code 1 of the first moment is.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
"""Elements that share a scale."""
LEAST = 2
"""The least code of a second moment above 0."""


def levels_of(codes: torch.dtype) -> tuple[int, int]:
    """The largest code of a dtype (int8, uint8), and how often its share of it is squared."""
    return (127, 2) if codes is torch.int8 else (255, 3)


def blocks_of(count: int) -> int:
    """How many scales `count` elements have; the last block may be short."""
    return -(-count // BLOCK)


def flat(tensor: Tensor) -> Tensor:
    """A walkable tensor (`multi_tensor.walkable`) as it lies in memory, (n,)."""
    return tensor.as_strided((tensor.numel(),), (1,))


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """What `codes` (int8 or uint8, any shape, walkable) mean: float32 of their shape and memory order.

    `scales`: float32 (blocks,). Where a scale is not finite, the block is NaN.
    """
    level, squarings = levels_of(codes.dtype)
    places = flat(codes).to(torch.float32)
    share = _power(places.abs(), level, squarings)
    if codes.dtype is torch.int8:
        share.copysign_(places)
    values = torch.empty_like(codes, dtype=torch.float32)
    flat(values).copy_(share * scales[:, None].expand(-1, BLOCK).reshape(-1)[: codes.numel()])
    return values


def quantize(values: Tensor, codes: torch.dtype, chances: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A float32 tensor as (codes of its shape and memory order, scales float32 (blocks,)).

    `values`: walkable; not negative for codes of `torch.uint8`. `chances`: whole numbers in [0, 65536), (n,) in memory
    order: a value goes up to the next code with the probability that makes the mean right; None: it goes to the
    nearest. The largest magnitude of a block is kept exactly, what is a code already keeps it, and a second moment
    above 0 gets at least code 2. A block with a number that is not finite gets a scale that is not.
    """
    level, squarings = levels_of(codes)
    count = values.numel()
    padded = torch.zeros(blocks_of(count) * BLOCK, dtype=torch.float32, device=values.device)
    padded[:count] = flat(values)
    blocks = padded.view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    usable = scales.isfinite() & (scales > 0)
    share = blocks.abs() / torch.where(usable, scales, 1.0)[:, None]
    share = torch.where(usable[:, None], share, 0.0).view(-1)[:count]
    root = share
    for _ in range(squarings):
        root = root.sqrt()
    lower = (root * level).floor().clamp_(max=level - 1)
    below, above = _power(lower, level, squarings), _power(lower + 1, level, squarings)
    chance = 0.5 if chances is None else (chances.to(torch.float32) + 0.5) * 2.0**-16
    chosen = lower + (share > below + (above - below) * chance)
    if codes is torch.int8:
        chosen.copysign_(padded[:count])
    else:
        chosen = torch.where(share > 0, chosen.clamp_min(LEAST), chosen)
    made = torch.empty_like(values, dtype=codes)
    flat(made).copy_(chosen)
    return made, scales


def _power(places: Tensor, level: int, squarings: int) -> Tensor:
    share = places * (1 / level)
    for _ in range(squarings):
        share = share * share
    return share
