"""Moments of Adam in 8 bits: blocks of 256 elements in memory order, one float32 scale a block.

Block-wise scales are those of Dettmers, Lewis, Shleifer and Zettlemoyer 2022 (8-bit optimizers via block-wise
quantization). Their codes are entries of a table; here they are small floating-point numbers, of which the largest
magnitude of a block is 1:

    first moment   int8   sign, 4 bits of exponent, 3 of mantissa   1 is code 120, subnormal below 2^-14, to 2^-17
    second moment  uint8  5 bits of exponent, 3 of mantissa         1 is code 240, subnormal below 2^-29, to 2^-32

Such a code is the upper end of a float32's bits, so that a GPU finds it by a shift, without roots or tables: it would
else be bound by instructions, and not by memory. The root of the second moment reaches as far down as the first.

Chance decides between the two codes around a number, because these are moving averages: a step changes a second moment
by about a thousandth, and codes are 6 to 12 % apart. Rounded to nearest, the moment of an element that falls silent in
a block that does not would stay for ever, and with it a step that is far too small; rounded by chance it is right in
the mean.

A second moment above 0 never becomes 0, which beside a first moment that does not would make an enormous step.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
"""Elements that share a scale."""
_ONE = {torch.int8: 15, torch.uint8: 30}
"""The exponent of 1, where float16 has 15 and float32 127."""


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
    places = flat(codes)
    share = (places.to(torch.int16).abs_() << 7).view(torch.float16).to(torch.float32)
    share *= 2.0 ** (15 - _ONE[codes.dtype])
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
    above 0 gets a code above 0. A block with a number that is not finite gets a scale that is not; one whose largest
    is below 2^-126 becomes zeros. Where torch flushes subnormal numbers, so does this: first moments below 2^-14.
    """
    one, count = _ONE[codes], values.numel()
    padded = torch.zeros(blocks_of(count) * BLOCK, dtype=torch.float32, device=values.device)
    padded[:count] = flat(values)
    blocks = padded.view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    usable = scales.isfinite() & (scales >= 2.0**-126)
    share = blocks.abs() * torch.where(usable, scales, 1.0).reciprocal()[:, None]
    share = torch.where(usable[:, None], share, 0.0).view(-1)[:count]
    chosen = (share * 2.0 ** (one - 127)).view(torch.int32)  # small ones are subnormal numbers of float32's, too
    chosen += 0x80000 if chances is None else (chances.to(torch.int32) << 4) + 8
    chosen >>= 20
    if codes is torch.int8:
        chosen = chosen.to(torch.float32).copysign_(padded[:count])
    else:
        chosen = torch.maximum(chosen, share > 0)
    made = torch.empty_like(values, dtype=codes)
    flat(made).copy_(chosen)
    return made, scales
