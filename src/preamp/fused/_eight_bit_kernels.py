# mypy: ignore-errors
# Triton's language: its values have no Python types.
"""Adam with moments in 8 bits as one Triton kernel. What the codes mean is told in `_eight_bit_codes`.

A program works on rows of 256 elements, which are the blocks. A row belongs to one warp, which finds its largest
magnitude by itself: its threads hold four elements of each half, so that every access is one run of memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..multi_tensor.device import address, put, start_of, take
from ._kernels import FACTOR, GO, KEEP, KEY, PLAIN, RATE, ROOT, SPLIT, chances, joined, mix, one_nan, publish

NEAREST = tl.constexpr(3)  # 16-bit weights without masters, rounded to nearest even
BLOCK = tl.constexpr(256)
FIRST_ONE = tl.constexpr(15)  # exponents of 1 in codes of the two moments
SECOND_ONE = tl.constexpr(30)
LEAST_SCALE = tl.constexpr(2.0**-126)


@triton.jit
def decode(code, ONE: tl.constexpr):
    """What the magnitudes of codes, int32, mean as shares of the scale: they are float16 numbers cut short."""
    share = (code << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return share if ONE == 15 else share * 2.0 ** (15 - ONE)


@triton.jit
def largest(values):
    """The largest magnitude of each row, as the bits of a float32; they order as numbers do, and NaN above all."""
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.max(bits, axis=2, keep_dims=True), axis=1, keep_dims=True)


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
    """Step one chunk. Rows: parameters, gradients, codes 1 and 2, scales 1 and 2, twins or low bits if any."""
    ROWS: tl.constexpr = CHUNK // BLOCK
    rows = tl.arange(0, ROWS)[:, None, None]
    columns = tl.arange(0, 2)[None, :, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, None, :]
    places = start + tl.max_contiguous(tl.multiple_of(rows * BLOCK + columns, (1, 1, 4)), (1, 1, 4))
    f32: tl.constexpr = tl.float32
    grad = take(address(table, 1, tensors, tensor, GRAD, ALIGNED), places, size, FULL).to(f32)
    if KIND == PLAIN:
        param_at = address(table, 0, tensors, tensor, f32, ALIGNED)
        param = take(param_at, places, size, FULL)
    elif KIND == NEAREST:
        param = take(address(table, 0, tensors, tensor, LOW, ALIGNED), places, size, FULL).to(f32)
    else:
        param_at = address(table, 0, tensors, tensor, tl.int16, ALIGNED)
        bits = take(param_at, places, size, FULL).to(tl.int32) << 16
        if KIND == SPLIT:
            bits_at = address(table, 6, tensors, tensor, tl.int16, ALIGNED)
            bits = joined(bits, take(bits_at, places, size, FULL).to(tl.int32))
        param = bits.to(f32, bitcast=True)
    block = start // BLOCK + rows
    blocks = (size + BLOCK - 1) // BLOCK
    first_at = address(table, 2, tensors, tensor, tl.int8, ALIGNED)
    second_at = address(table, 3, tensors, tensor, tl.uint8, ALIGNED)
    first_scale_at = address(table, 4, tensors, tensor, f32, ALIGNED)
    second_scale_at = address(table, 5, tensors, tensor, f32, ALIGNED)
    first_code = take(first_at, places, size, FULL).to(tl.int32)
    second_code = take(second_at, places, size, FULL).to(tl.int32)
    first_scale = take(first_scale_at, block, blocks, FULL)
    second_scale = take(second_scale_at, block, blocks, FULL)
    first = decode(tl.abs(first_code), FIRST_ONE)
    first = tl.where(first_code < 0, -first, first) * first_scale
    second = decode(second_code, SECOND_ONE) * second_scale

    grad = grad * tl.load(scalars + FACTOR)
    if DECAY == 1:
        grad = grad + decay * param
    if DECAY == 2:
        param = param * tl.load(scalars + KEEP)
    first = first + one_beta1 * (grad - first)
    second = beta2 * second + one_beta2 * (grad * grad)
    inverse = tl.rsqrt(tl.sqrt(second) * tl.load(scalars + ROOT) + eps)
    param = param - tl.load(scalars + RATE) * first * (inverse * inverse)

    key = tl.load(scalars + KEY).to(tl.uint32, bitcast=True)
    chance = chances(key, tl.load(table + (6 if (KIND != SPLIT and (LOW is None or KIND == NEAREST)) else 7) * tensors
                                  + tensor), places)  # fmt: skip
    first_scale = largest(first).to(f32, bitcast=True)
    second_scale = largest(second).to(f32, bitcast=True)
    code, _ = encode(tl.abs(first), first_scale, (chance >> 12 & 0xFFFF0 | 8).to(tl.int32), FIRST_ONE)
    code = tl.where(first < 0, -code, code)
    upper, share = encode(second, second_scale, (chance << 4 & 0xFFFF0 | 8).to(tl.int32), SECOND_ONE)
    upper = tl.maximum(upper, (share > 0).to(tl.int32))

    if KIND == PLAIN:
        if LOW is not None:
            publish(table, 6, tensors, tensor, places, param, size, LOW, FULL, ALIGNED)
        put(param_at, places, param, size, FULL)
    elif KIND == NEAREST:
        publish(table, 0, tensors, tensor, places, param, size, LOW, FULL, ALIGNED)
    else:
        bits = one_nan(param.to(tl.int32, bitcast=True))
        if KIND == SPLIT:
            put(bits_at, places, bits.to(tl.int16), size, FULL)
            bits = bits + 0x8000
        else:
            bits = bits + (mix(chance) >> 16).to(tl.int32)
        put(param_at, places, (bits >> 16).to(tl.int16), size, FULL)
    put(first_at, places, code.to(tl.int8), size, FULL)
    put(second_at, places, upper.to(tl.uint8), size, FULL)
    put(first_scale_at, block, first_scale, blocks, FULL)
    put(second_scale_at, block, second_scale, blocks, FULL)


@triton.jit(do_not_specialize=["tensors"])
def adam_8bit(
    scalars, tensor_of, block_of, sizes, table, tensors, one_beta1, beta2, one_beta2, eps, decay,
    GRAD: tl.constexpr, LOW: tl.constexpr, KIND: tl.constexpr, DECAY: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Adam or AdamW; `DECAY`: 0 none, 1 in the gradient, 2 decoupled."""
    if tl.load(scalars + GO) > 0:
        program = tl.program_id(0)
        tensor = tl.load(tensor_of + program)
        start = start_of(block_of, program, CHUNK)
        size = tl.load(sizes + tensor)
        if start + CHUNK <= size:
            adam_8bit_chunk(
                scalars, table, tensors, tensor, start, size, one_beta1, beta2, one_beta2, eps, decay,
                GRAD, LOW, KIND, DECAY, True, ALIGNED, CHUNK,
            )  # fmt: skip
        else:
            adam_8bit_chunk(
                scalars, table, tensors, tensor, start, size, one_beta1, beta2, one_beta2, eps, decay,
                GRAD, LOW, KIND, DECAY, False, ALIGNED, CHUNK,
            )  # fmt: skip
