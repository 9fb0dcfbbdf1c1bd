"""Adam with moments in 8 bits as one Triton kernel. `kernels.eight_bit` defines the codes.

A program is one warp and loops over the blocks of its chunk, 256 elements each: it finds their largest magnitudes
without shared memory and barriers. Threads hold four elements of each half, so that every access is contiguous, and
what a chunk needs once is loaded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..storage import AdamOptions, Storage, Tensors
from .elementwise import (
    PLAIN,
    SPLIT,
    SPLIT24,
    STOCHASTIC,
    adam_constants,
    adam_numbers,
    chances,
    decay_of,
    joined,
    kind_of,
    one_nan,
    publish_at,
    rounded_to_24,
)
from .launch import (
    FACTOR,
    GO,
    KEEP,
    KEY,
    RATE,
    ROOT,
    address,
    chunk_of,
    launch,
    mix,
    on,
    parts,
    put,
    take,
    type_of,
    type_of_copies,
    wrote,
)

NEAREST = tl.constexpr(4)  # 16-bit weights without masters, rounded to nearest even
BLOCK = tl.constexpr(256)
FIRST_ONE = tl.constexpr(15)  # exponents of 1 in codes of the two moments
SECOND_ONE = tl.constexpr(30)
LEAST_SCALE = tl.constexpr(2.0**-126)


WARPS = 1
"""One warp finds the largest magnitude of a block."""
REGISTERS = 56
"""Of a thread. Triton would use 64 to 80, and with more than 64 fewer than 32 warps fit on a multiprocessor; with 56
nothing is spilled."""
LIMIT = {} if torch.version.hip else {"maxnreg": REGISTERS}
"""An option that Triton has for CUDA only."""


def adam_8bit_step(storage: Storage, gradients: Tensors, o: AdamOptions) -> None:
    """States: codes of moments 1 and 2, then their scales."""
    param = storage.params[0]
    kind = kind_of(storage)
    if kind is STOCHASTIC and not (o.stochastic_rounding and param.dtype is torch.bfloat16):
        kind = NEAREST
    with on(param.device):
        scalars = adam_numbers(storage, o, o.seed)
        low = type_of(param.dtype) if kind is NEAREST else type_of_copies(storage)
        for grad, part in parts(storage, gradients):
            launch(
                adam_8bit, part, (scalars,), adam_constants(o), warps=WARPS, GRAD=grad, LOW=low, KIND=int(kind.value),
                DECAY=decay_of(o), **LIMIT,
            )  # fmt: skip
    wrote(storage)


@triton.jit
def decode(code, ONE: tl.constexpr):
    """The magnitudes of codes, int32, decoded as shares of the scale: codes are truncated float16 numbers."""
    share = (code << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return share if ONE == 15 else share * 2.0 ** (15 - ONE)


@triton.jit
def largest(values):
    """The largest magnitude, as the bits of a float32; they order as numbers do, and NaN above all."""
    return tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)


@triton.jit
def encode(magnitude, scale, chance, ONE: tl.constexpr):
    """The code, int32, of each magnitude, and its share of the row's scale. `chance`: 20 bits."""
    usable = (scale >= LEAST_SCALE) & (scale < float("inf"))
    inverse = 1.0 / tl.where(usable, scale, 1.0)
    share = tl.where(usable, magnitude * inverse, 0.0)
    bits = (share * 2.0 ** (ONE - 127)).to(tl.int32, bitcast=True)  # of float32's subnormal numbers, too
    return (bits + chance) >> 20, share


@triton.jit
def adam_8bit_chunk(
    scalars, table, tensors, tensor, start, size, one_beta1, beta2, one_beta2, eps, decay,
    GRAD: tl.constexpr, LOW: tl.constexpr, KIND: tl.constexpr, DECAY: tl.constexpr,
    FULL: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Step one chunk. Rows: parameters, gradients, codes 1 and 2, scales 1 and 2, copies or low bits if any."""
    f32: tl.constexpr = tl.float32
    ALONE: tl.constexpr = LOW is None if KIND == PLAIN else (KIND != SPLIT and KIND != SPLIT24)
    LAST: tl.constexpr = 6 if ALONE else 7  # the tensor's position
    grad_at = start + address(table, 1, tensors, tensor, GRAD, ALIGNED)
    if KIND == PLAIN:
        param_at = start + address(table, 0, tensors, tensor, f32, ALIGNED)
        if LOW is not None:
            low_at = start + address(table, 6, tensors, tensor, LOW, ALIGNED)
    elif KIND == NEAREST:
        param_at = start + address(table, 0, tensors, tensor, LOW, ALIGNED)
    else:
        param_at = start + address(table, 0, tensors, tensor, tl.int16, ALIGNED)
        if KIND == SPLIT:
            bits_at = start + address(table, 6, tensors, tensor, tl.int16, ALIGNED)
        if KIND == SPLIT24:
            bits_at = start + address(table, 6, tensors, tensor, tl.int8, ALIGNED)
    first_at = start + address(table, 2, tensors, tensor, tl.int8, ALIGNED)
    second_at = start + address(table, 3, tensors, tensor, tl.uint8, ALIGNED)
    first_scale_at = start // BLOCK + address(table, 4, tensors, tensor, f32, ALIGNED)
    second_scale_at = start // BLOCK + address(table, 5, tensors, tensor, f32, ALIGNED)
    factor = tl.load(scalars + FACTOR)
    keep = tl.load(scalars + KEEP)
    root = tl.load(scalars + ROOT)
    rate = tl.load(scalars + RATE)
    key = tl.load(scalars + KEY).to(tl.uint32, bitcast=True)
    spot = tl.load(table + LAST * tensors + tensor)
    # four adjacent elements instead of eight, with which loads of 16 bytes would not be contiguous
    columns = tl.max_contiguous(tl.multiple_of(tl.arange(0, BLOCK), 4), 4)
    left = tl.minimum(size - start, CHUNK).to(tl.int32)

    for row in range(0, CHUNK if FULL else left, BLOCK):
        places = row + columns  # from the start of the chunk
        block = row // BLOCK
        grad = take(grad_at, places, left, FULL).to(f32)
        if KIND == PLAIN:
            param = take(param_at, places, left, FULL)
        elif KIND == NEAREST:
            param = take(param_at, places, left, FULL).to(f32)
        else:
            bits = take(param_at, places, left, FULL).to(tl.int32) << 16
            if KIND == SPLIT:
                bits = joined(bits, take(bits_at, places, left, FULL).to(tl.int32))
            if KIND == SPLIT24:
                bits = joined(bits, take(bits_at, places, left, FULL).to(tl.int32) << 8)
            param = bits.to(f32, bitcast=True)
        first_code = take(first_at, places, left, FULL).to(tl.int32)
        second_code = take(second_at, places, left, FULL).to(tl.int32)
        first = decode(tl.abs(first_code), FIRST_ONE)
        first = tl.where(first_code < 0, -first, first) * tl.load(first_scale_at + block)
        second = decode(second_code, SECOND_ONE) * tl.load(second_scale_at + block)

        grad = grad * factor
        if DECAY == 1:
            grad = grad + decay * param
        if DECAY == 2:
            param = param * keep
        first = first + one_beta1 * (grad - first)
        second = beta2 * second + one_beta2 * (grad * grad)
        inverse = tl.rsqrt(tl.sqrt(second) * root + eps)
        param = param - rate * first * (inverse * inverse)

        if KIND == PLAIN:
            if LOW is not None:
                publish_at(low_at, places, param, left, LOW, FULL)
            put(param_at, places, param, left, FULL)
        elif KIND == NEAREST:
            publish_at(param_at, places, param, left, LOW, FULL)
        chance = chances(key, spot, start + places)
        if KIND == SPLIT:
            bits = one_nan(param.to(tl.int32, bitcast=True))
            put(bits_at, places, bits.to(tl.int16), left, FULL)
            put(param_at, places, (bits + 0x8000 >> 16).to(tl.int16), left, FULL)
        if KIND == SPLIT24:
            bits = rounded_to_24(one_nan(param.to(tl.int32, bitcast=True)), mix(chance))
            put(bits_at, places, (bits << 16 >> 24).to(tl.int8), left, FULL)
            put(param_at, places, (bits + 0x8000 >> 16).to(tl.int16), left, FULL)
        if KIND == STOCHASTIC:
            bits = one_nan(param.to(tl.int32, bitcast=True)) + (mix(chance) >> 16).to(tl.int32)
            put(param_at, places, (bits >> 16).to(tl.int16), left, FULL)

        first_scale = largest(first).to(f32, bitcast=True)
        second_scale = largest(second).to(f32, bitcast=True)
        tl.store(first_scale_at + block, first_scale)
        tl.store(second_scale_at + block, second_scale)
        code, _ = encode(tl.abs(first), first_scale, (chance >> 12 & 0xFFFF0 | 8).to(tl.int32), FIRST_ONE)
        put(first_at, places, tl.where(first < 0, -code, code).to(tl.int8), left, FULL)
        upper, share = encode(second, second_scale, (chance << 4 & 0xFFFF0 | 8).to(tl.int32), SECOND_ONE)
        upper = tl.maximum(upper, (share > 0).to(tl.int32))
        put(second_at, places, upper.to(tl.uint8), left, FULL)


@triton.jit(do_not_specialize=["tensors"])
def adam_8bit(
    scalars, tensor_of, block_of, sizes, table, tensors, one_beta1, beta2, one_beta2, eps, decay,
    GRAD: tl.constexpr, LOW: tl.constexpr, KIND: tl.constexpr, DECAY: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Adam or AdamW; `DECAY`: 0 none, 1 in the gradient, 2 decoupled."""
    if tl.load(scalars + GO) > 0:
        tensor, start, size = chunk_of(tensor_of, block_of, sizes, CHUNK)
        for whole in tl.static_range(2):  # whole chunks need no masks
            if (start + CHUNK <= size) == (whole == 1):
                adam_8bit_chunk(
                    scalars, table, tensors, tensor, start, size, one_beta1, beta2, one_beta2, eps, decay,
                    GRAD, LOW, KIND, DECAY, whole == 1, ALIGNED, CHUNK,
                )  # fmt: skip
