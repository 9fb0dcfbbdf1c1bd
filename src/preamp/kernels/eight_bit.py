"""Adam with moments in 8 bits: a step decodes them, computes in float32, and rounds them stochastically.

Codes are in blocks of 256 elements in memory order, one float32 scale a block.

Block-wise scales are those of Dettmers, Lewis, Shleifer and Zettlemoyer 2022 (8-bit optimizers via block-wise
quantization). Their codes are entries of a table; here they are small floating-point numbers, of which the largest
magnitude of a block is 1:

    first moment   int8   sign, 4 bits of exponent, 3 of mantissa   1 is code 120, subnormal below 2^-14, to 2^-17
    second moment  uint8  5 bits of exponent, 3 of mantissa         1 is code 240, subnormal below 2^-29, to 2^-32

Such a code is the upper end of a float32's bits, so a GPU finds it by a shift. With roots or tables the kernel would be
bound by instructions instead of memory. The root of the second moment reaches as far down as the first.

Rounding is stochastic, between the two codes around a number, because moments are moving averages: a step changes a
second moment by about a thousandth, and codes are 6 to 12 % apart. With rounding to nearest, if an element's gradients
become small and those of its block do not, its second moment would never fall, and its steps would stay far too small.
With stochastic rounding the moment is right in the mean.

A second moment above 0 never becomes 0: beside a first moment that is not 0, that would make an enormous step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..formats import LOW_DTYPES
from .adam import adam
from .bits import chances_like, join, mix, round_stochastically, split
from .dispatch import Algorithm, dispatch
from .foreach import gate_of
from .lists import flat, unflattened
from .storage import AdamOptions, Storage, Tensors

BLOCK = 256
"""Elements that share a scale."""

_ONE = {torch.int8: 15, torch.uint8: 30}
"""The exponent of 1, where float16 has 15 and float32 127."""


def blocks_of(count: int) -> int:
    """The number of scales for `count` elements; the last block may be short."""
    return -(-count // BLOCK)


def blocks_in_a_row(param: Tensor) -> int:
    """The blocks in a row of a parameter; 0 if a block has parts of two rows, which may go to two ranks."""
    row = param.numel() // param.shape[0]
    return 0 if row % BLOCK else row // BLOCK


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """The values of `codes` (int8 or uint8, any shape, walkable): float32 of their shape and memory order.

    `scales`: float32 (blocks,). Where a scale is not finite, the block is NaN.
    """
    places = flat(codes)
    share = (places.to(torch.int16).abs_() << 7).view(torch.float16).to(torch.float32)
    share *= 2.0 ** (15 - _ONE[codes.dtype])
    if codes.dtype is torch.int8:
        share.copysign_(places)
    return unflattened(share * scales[:, None].expand(-1, BLOCK).reshape(-1)[: codes.numel()], codes)


def quantize(values: Tensor, codes: torch.dtype, chances: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A float32 tensor as (codes of its shape and memory order, scales float32 (blocks,)).

    `values`: walkable; not negative for codes of `torch.uint8`. `chances`: whole numbers in [0, 65536), (n,) in memory
    order: a value is rounded up to the next code with the probability that makes the mean right; None: it is rounded
    to nearest. The largest magnitude of a block is exact, values that are codes do not change, and a second moment
    above 0 gets a code above 0. A block with a non-finite number gets a non-finite scale. A block whose largest is
    below 2^-126 becomes zeros. Where torch flushes subnormal numbers, first moments below 2^-14 become zeros, too.
    """
    one, count = _ONE[codes], values.numel()
    padded = torch.zeros(blocks_of(count) * BLOCK, dtype=torch.float32, device=values.device)
    padded[:count] = flat(values)
    blocks = padded.view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    usable = scales.isfinite() & (scales >= 2.0**-126)
    share = blocks.abs() * torch.where(usable, scales, 1.0).reciprocal()[:, None]
    share = torch.where(usable[:, None], share, 0.0).view(-1)[:count]
    chosen = (share * 2.0 ** (one - 127)).view(torch.int32)  # small ones are subnormal in float32, too
    chosen += 0x80000 if chances is None else (chances.to(torch.int32) << 4) + 8
    chosen >>= 20
    if codes is torch.int8:
        chosen = chosen.to(torch.float32).copysign_(padded[:count])
    else:
        chosen = torch.maximum(chosen, share > 0)
    return unflattened(chosen.to(codes), values), scales


def adam_8bit(storage: Storage, gradients: Tensors, o: AdamOptions) -> None:
    """One step of `adam.adam` (without AMSGrad), in place, its moments kept in 8 bits.

    States: codes of the first moments (int8) and of the second (uint8), of the parameters' shapes and dense in memory;
    then the scales of each, float32 (blocks,), one number for each 256 elements in memory order. All start as
    zeros. A step is that of `adam.adam` on the decoded numbers (`dequantize`); each new moment is rounded
    stochastically to one of the two codes around it. The random numbers are a function of `seed`, the step number, the
    tensor's position in the list and the element's position in memory: a run can be repeated, with or without kernels.

    16-bit parameters without masters are rounded to nearest, or, bfloat16 with `stochastic_rounding`, stochastically.
    Where Triton runs, there is one launch for each dtype of gradients, which reads and writes 4 bytes of states a
    parameter. Elsewhere the states of one tensor at a time become float32.
    """
    dispatch(_ADAM_8BIT, storage, gradients, o)


def _adam_8bit(storage: Storage, gradients: Tensors, o: AdamOptions) -> None:
    gate = gate_of(storage.params[0].device, o.found)
    if gate is None:
        return
    assert storage.step is not None
    taken = storage.step + 1
    beside: Sequence[Any] = storage.bits or storage.copies or [None] * len(storage.params)
    rows = zip(storage.params, gradients, *storage.states, beside, strict=True)
    for i, (param, gradient, first_codes, second_codes, first_scales, second_scales, other) in enumerate(rows):
        chances = chances_like(flat(first_codes), o.seed, taken, i)
        first, second = dequantize(first_codes, first_scales), dequantize(second_codes, second_scales)
        stochastic = other is None and o.stochastic_rounding and param.dtype is torch.bfloat16
        wide, copy = param, other
        if storage.bits:
            wide, copy = join(param, other), None
        elif param.dtype in LOW_DTYPES:
            wide, copy = param.to(torch.float32), None if stochastic else param
        moved = Storage([wide], ([first], [second]), storage.step.clone(), [copy] if copy is not None else None)
        adam(moved, [gradient], o)
        if storage.bits:
            own = unflattened(mix(chances), param) if other.dtype is torch.int8 else None
            gate.write([param, other], split(wide, other.dtype, own))
        elif stochastic:
            gate.write([param], [round_stochastically(wide, unflattened(mix(chances), param))])
        gate.write([first_codes, first_scales], quantize(first, torch.int8, chances >> 16))
        gate.write([second_codes, second_scales], quantize(second, torch.uint8, chances & 0xFFFF))
    gate.begin(storage.step)
    gate.settle(storage.step)


_ADAM_8BIT = Algorithm(_adam_8bit, "eight_bit.adam_8bit_step", elementwise=False, low=True, shaped=2)
