# mypy: ignore-errors
# Triton's language: its values have no Python types.
"""Adam with moments in 8 bits as one Triton kernel. What the codes mean is told in `_eight_bit_codes`.

A program works on rows of 256 elements, which are the blocks; a row is eight elements of each thread of one warp, so
that its largest magnitude is found within the warp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..multi_tensor.device import address, put, start_of, take
from ._kernels import FACTOR, GO, KEEP, PLAIN, RATE, ROOT, SPLIT, chances, joined, mix, one_nan, publish

NEAREST = tl.constexpr(3)  # 16-bit weights without masters, rounded to nearest even
BLOCK = tl.constexpr(256)
FIRST_LEVEL = tl.constexpr(127)
FIRST_SQUARINGS = tl.constexpr(2)
SECOND_LEVEL = tl.constexpr(255)
SECOND_SQUARINGS = tl.constexpr(3)
LEAST = tl.constexpr(2.0)


@triton.jit
def power(places, LEVEL: tl.constexpr, SQUARINGS: tl.constexpr):
    """What codes 0, 1, ... `LEVEL` mean as shares of the scale."""
    share = places * (1.0 / LEVEL)
    for _ in tl.static_range(SQUARINGS):
        share = share * share
    return share


@triton.jit
def largest(values):
    """The largest magnitude of each row, as the bits of a float32; they order as numbers do, and NaN above all."""
    return tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@triton.jit
def encode(values, scale, usable, chance, LEVEL: tl.constexpr, SQUARINGS: tl.constexpr):
    """The code of each magnitude as a float32 whole number, and whether the magnitude is above 0."""
    share = tl.div_rn(tl.abs(values), tl.broadcast_to(tl.where(usable, scale, 1.0)[:, None], values.shape))
    share = tl.where(usable[:, None], share, 0.0)
    root = share
    for _ in tl.static_range(SQUARINGS):
        root = tl.sqrt_rn(root)
    lower = tl.minimum(tl.floor(root * LEVEL), LEVEL - 1.0)
    below = power(lower, LEVEL, SQUARINGS)
    above = power(lower + 1.0, LEVEL, SQUARINGS)
    middle = (chance.to(tl.float32) + 0.5) * (1.0 / 65536)
    return tl.where(share > below + (above - below) * middle, lower + 1.0, lower), share > 0


@triton.jit
def adam_8bit_chunk(
    scalars, step, table, tensors, tensor, start, size, one_beta1, beta2, one_beta2, eps, decay, seed_high, seed_low,
    GRAD: tl.constexpr, LOW: tl.constexpr, KIND: tl.constexpr, DECAY: tl.constexpr,
    FULL: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Step one chunk. Rows: parameters, gradients, codes 1 and 2, scales 1 and 2, twins or low bits if any."""
    ROWS: tl.constexpr = CHUNK // BLOCK
    rows = tl.arange(0, ROWS)
    places = start + (rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])
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
    first_code = take(first_at, places, size, FULL).to(f32)
    second_code = take(second_at, places, size, FULL).to(f32)
    first_scale = take(first_scale_at, block, blocks, FULL)
    second_scale = take(second_scale_at, block, blocks, FULL)
    first = power(tl.abs(first_code), FIRST_LEVEL, FIRST_SQUARINGS)
    first = tl.where(first_code < 0, -first, first) * first_scale[:, None]
    second = power(second_code, SECOND_LEVEL, SECOND_SQUARINGS) * second_scale[:, None]

    grad = grad * tl.load(scalars + FACTOR)
    if DECAY == 1:
        grad = grad + decay * param
    if DECAY == 2:
        param = param * tl.load(scalars + KEEP)
    first = first + one_beta1 * (grad - first)
    second = beta2 * second + one_beta2 * (grad * grad)
    below = tl.sqrt_rn(second) * tl.load(scalars + ROOT) + eps
    param = param - tl.load(scalars + RATE) * tl.div_rn(first, below)

    count = tl.load(step).to(tl.int32).to(tl.uint32)
    key = mix(mix(tl.full((), seed_low, tl.uint32) ^ mix(tl.full((), seed_high, tl.uint32))) + count)
    chance = chances(key, tl.load(table + (6 if (KIND != SPLIT and (LOW is None or KIND == NEAREST)) else 7) * tensors
                                  + tensor), places)  # fmt: skip
    first_bits = largest(first)
    second_bits = largest(second)
    first_scale = first_bits.to(f32, bitcast=True)
    second_scale = second_bits.to(f32, bitcast=True)
    usable = (first_bits > 0) & (first_bits < 0x7F800000)
    code, _ = encode(first, first_scale, usable, (chance >> 16).to(tl.int32), FIRST_LEVEL, FIRST_SQUARINGS)
    code = tl.where(first < 0, -code, code)
    usable = (second_bits > 0) & (second_bits < 0x7F800000)
    upper, some = encode(second, second_scale, usable, (chance & 0xFFFF).to(tl.int32), SECOND_LEVEL, SECOND_SQUARINGS)
    upper = tl.where(some, tl.maximum(upper, LEAST), upper)

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
    put(first_at, places, code.to(tl.int32).to(tl.int8), size, FULL)
    put(second_at, places, upper.to(tl.int32).to(tl.uint8), size, FULL)
    put(first_scale_at, block, first_scale, blocks, FULL)
    put(second_scale_at, block, second_scale, blocks, FULL)


@triton.jit(do_not_specialize=["tensors", "seed_high", "seed_low"])
def adam_8bit(
    scalars, step, tensor_of, block_of, sizes, table, tensors, one_beta1, beta2, one_beta2, eps, decay,
    seed_high, seed_low,
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
                scalars, step, table, tensors, tensor, start, size, one_beta1, beta2, one_beta2, eps, decay,
                seed_high, seed_low, GRAD, LOW, KIND, DECAY, True, ALIGNED, CHUNK,
            )  # fmt: skip
        else:
            adam_8bit_chunk(
                scalars, step, table, tensors, tensor, start, size, one_beta1, beta2, one_beta2, eps, decay,
                seed_high, seed_low, GRAD, LOW, KIND, DECAY, False, ALIGNED, CHUNK,
            )  # fmt: skip
