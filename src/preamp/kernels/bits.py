"""bfloat16 weights that lose no updates: split float32 numbers, and stochastic rounding.

A float32 number is a bfloat16 weight and 16 bits more. The weight that the model sees is the nearest bfloat16 number
to the master. One number in 65536 is a tie, which goes to the larger magnitude. (Ties to even would give every even
weight 65537 masters, one more than 16 bits can distinguish; ties away from zero give each weight exactly 65536.) The
other 16 bits are the unchanged low half of the master. As a signed number they are the distance from the weight to the
master, so `(weight << 16) + bits` is the master again, carries included. A weight of zero has no negative distance: a
number a little below zero rounds to minus zero, and its distance from that is positive.

Of the 16 bits the upper 8 may be kept alone (int8). A master then has 24 bits, and is within 2^-15 of what was
computed: it is rounded stochastically, so that smaller updates survive in the mean.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..sharding import held_here, placed_like
from .lists import unflattened

_NAN = 0x7FC00000
_MASK = 0xFFFFFFFF


def split(master: Tensor, kept: torch.dtype = torch.int16, chances: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A float32 tensor as (bfloat16 weight, bits of dtype `kept`), of its shape; `join` puts it together.

    The weight is the master rounded to nearest, ties away from zero, to infinity beyond bfloat16's range. Every NaN
    becomes the same quiet NaN. int16 bits give the master back bit for bit. With int8 ones it is first rounded to 24
    bits: by `chances`, int64 random numbers in [0, 2**32), of the shape of its local shard, or to nearest without.
    """
    number, shape = _bits_of(held_here(master)), tuple(master.shape)
    if kept is torch.int8:
        number = (number + (0x80 if chances is None else (chances >> 24).to(torch.int32))) & ~0xFF
    weight, low = ((number + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), number.to(torch.int16)
    bits = low if kept is torch.int16 else (low >> 8).to(torch.int8)
    return placed_like(master, weight, shape), placed_like(master, bits, shape)


def join(weight: Tensor, bits: Tensor) -> Tensor:
    """The float32 tensor that `split` took apart.

    A weight that was written since then keeps its low bits. The exception is a zero with a negative distance: no
    number splits into that, and joining it would give NaN, so the result is zero.
    """
    here, low = held_here(weight), held_here(bits)
    number = here.to(torch.float32).view(torch.int32)  # the weight in the upper half
    low = low.to(torch.int16) << 8 if low.dtype is torch.int8 else low
    number.add_(torch.where(here == 0, low.clamp_min(0), low))
    return placed_like(weight, number.view(torch.float32), tuple(weight.shape))


def round_stochastically(values: Tensor, chances: Tensor) -> Tensor:
    """Round float32 to bfloat16, up with the probability that makes the mean right.

    `chances`: int64 random numbers in [0, 2**32), of the shape of `values`; their upper 16 bits are used. Values
    that bfloat16 can represent do not change.
    """
    number = _bits_of(values) + (chances >> 16).to(torch.int32)
    return (number >> 16).to(torch.int16).view(torch.bfloat16)


def chances_like(tensor: Tensor, seed: int, step: Tensor | int, position: int) -> Tensor:
    """Random numbers in [0, 2**32), int64, of the shape and memory order of `tensor`.

    They depend only on `seed` (62 bits of it are used), `step` (a whole number), the tensor's `position` in its
    list and each element's position in memory. The kernels generate the same numbers.
    """
    count = step.to(torch.int64) if isinstance(step, Tensor) and step.device.type != "cpu" else int(step)
    key = mix((mix((seed & 0x7FFFFFFF) ^ mix(seed >> 31 & 0x7FFFFFFF)) + count) & _MASK)
    of_tensor = mix((key + position * 0x9E3779B9) & _MASK)
    places = torch.arange(tensor.numel(), device=tensor.device)
    made = mix((places & _MASK) ^ mix(of_tensor + (places >> 32) & _MASK))
    return unflattened(made, tensor)


def mix(value: Any) -> Any:
    """Hash 32 bits so that each depends on all of them (the finalizer of MurmurHash3)."""
    value = value ^ (value >> 16)
    value = (value * 0x85EBCA6B) & _MASK
    value = value ^ (value >> 13)
    value = (value * 0xC2B2AE35) & _MASK
    return value ^ (value >> 16)


def _bits_of(values: Tensor) -> Tensor:
    number = values.view(torch.int32)
    return torch.where((number & 0x7FFFFFFF) > 0x7F800000, _NAN, number)
