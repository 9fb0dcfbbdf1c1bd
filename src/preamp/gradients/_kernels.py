"""Reading gradients on the device: one pass of many programs, and a short one that puts their findings together.

Magnitudes are compared as integers, sign bit off: there infinity and NaN are simply the largest numbers, so one
maximum gives both the largest magnitude and whether everything was finite. Sums are made in a fixed order, without
atomics: the same gradients give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..multi_tensor.device import address, start_of, take

FOUND = tl.constexpr(0)
NORM = tl.constexpr(1)
AMAX = tl.constexpr(2)
INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def as_float(bits, KIND: tl.constexpr):
    """Magnitudes as float32, from the integers that stand for them in float16 (0), bfloat16 (1) or float32 (2)."""
    if KIND == 0:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    if KIND == 1:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def magnitudes(pointer, places, size, KIND: tl.constexpr, FULL: tl.constexpr):
    """Load numbers as int32 with the sign off; zeros beyond the end."""
    bits = take(pointer, places, size, FULL)
    if KIND == 2:
        return bits & 0x7FFFFFFF
    return (bits & 0x7FFF).to(tl.int32)


@triton.jit
def read_chunk(
    pointer, start, size, tiny, spot, squares, tops, lows, zeros,
    KIND: tl.constexpr, COUNTS: tl.constexpr, FULL: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read one chunk, and write its two numbers, or four."""
    top = tl.zeros((BLOCK,), tl.int32)
    total = tl.zeros((BLOCK,), tl.float32)
    if COUNTS:
        low = tl.zeros((BLOCK,), tl.int32)
        zero = tl.zeros((BLOCK,), tl.int32)
    length = tl.minimum(size - start, CHUNK).to(tl.int32)
    for block in range(0, CHUNK if FULL else length, BLOCK):
        bits = magnitudes(pointer, start + block + tl.arange(0, BLOCK), size, KIND, FULL)
        values = as_float(bits, KIND)
        top = tl.maximum(top, bits)
        if COUNTS:
            low += (bits < tiny).to(tl.int32)
            zero += (bits == 0).to(tl.int32)
        total += values * values
    largest = as_float(tl.max(top, 0), KIND)
    square = tl.sum(total, 0).to(tl.float64)
    if KIND != 0:  # squares of float16 numbers neither overflow nor vanish in float32
        too_big = (largest > 2.0**50) & (largest < float("inf"))
        too_small = (largest < 2.0**-40) & (largest > 0)
        if too_big | too_small:  # rare, so it costs nothing to read the chunk again, scaled by a power of two
            scale = tl.where(too_big, 2.0**-90, 2.0**90)
            total = tl.zeros((BLOCK,), tl.float32)
            for block in range(0, CHUNK if FULL else length, BLOCK):
                bits = magnitudes(pointer, start + block + tl.arange(0, BLOCK), size, KIND, FULL)
                values = as_float(bits, KIND) * scale
                total += values * values
            back = tl.where(too_big, tl.full((), 2.0**90, tl.float64), tl.full((), 2.0**-90, tl.float64))
            square = tl.sum(total, 0).to(tl.float64) * back * back
    tl.store(squares + spot, square)
    tl.store(tops + spot, largest)
    if COUNTS:
        padding = (length + BLOCK - 1) // BLOCK * BLOCK - length  # loaded as zeros
        tl.store(lows + spot, tl.sum(low, 0) - padding)
        tl.store(zeros + spot, tl.sum(zero, 0) - padding)


@triton.jit(do_not_specialize=["tensors", "tiny", "base"])
def read(
    tensor_of, block_of, sizes, table, tensors, tiny, base, squares, tops, lows, zeros,
    KIND: tl.constexpr, INTEGER: tl.constexpr, COUNTS: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """For each chunk: sum of squares (float64), largest magnitude (float32), and with `COUNTS` two counts (int32).

    Chunks' numbers begin at `base`. `lows` counts entries whose magnitude as an integer is below `tiny`, and zeros.
    """
    program = tl.program_id(0)
    tensor = tl.load(tensor_of + program)
    start = start_of(block_of, program, CHUNK)
    size = tl.load(sizes + tensor)
    pointer = address(table, 0, tensors, tensor, INTEGER, ALIGNED)
    if start + CHUNK <= size:
        read_chunk(
            pointer, start, size, tiny, base + program, squares, tops, lows, zeros, KIND, COUNTS, True, CHUNK, BLOCK
        )
    else:
        read_chunk(
            pointer, start, size, tiny, base + program, squares, tops, lows, zeros, KIND, COUNTS, False, CHUNK, BLOCK
        )


@triton.jit
def highest(tops, begin, end, BLOCK: tl.constexpr):
    """The largest of some chunks' magnitudes, as an integer: NaN above infinity above numbers."""
    top = tl.zeros((BLOCK,), tl.int32)
    for block in range(begin, end, BLOCK):
        places = block + tl.arange(0, BLOCK)
        values = tl.load(tops + places, mask=places < end, other=0.0)
        top = tl.maximum(top, values.to(tl.int32, bitcast=True))
    return tl.max(top, 0)


@triton.jit(do_not_specialize=["tensors", "base", "chunks"])
def finish(first, table, tensors, base, chunks, squares, tops, lows, zeros, flags, floats, counts,
           COUNTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A flag for each gradient of a part, whose chunks begin at `base`; one program more sums over all `chunks`."""
    tensor = tl.program_id(0)
    if tensor < tensors:
        begin = base + tl.load(first + tensor)
        end = base + tl.load(first + tensor + 1)
        bad = highest(tops, begin, end, BLOCK) >= INFINITY
        tl.store(flags + tl.load(table + tensors + tensor), bad.to(tl.uint8))
    else:
        top = highest(tops, 0, chunks, BLOCK)
        square = tl.zeros((BLOCK,), tl.float64)
        if COUNTS:
            low = tl.zeros((BLOCK,), tl.int64)
            zero = tl.zeros((BLOCK,), tl.int64)
        for block in range(0, chunks, BLOCK):
            places = block + tl.arange(0, BLOCK)
            inside = places < chunks
            square += tl.load(squares + places, mask=inside, other=0.0)
            if COUNTS:
                low += tl.load(lows + places, mask=inside, other=0).to(tl.int64)
                zero += tl.load(zeros + places, mask=inside, other=0).to(tl.int64)
        tl.store(floats + FOUND, (top >= INFINITY).to(tl.float32))
        tl.store(floats + NORM, tl.sqrt(tl.sum(square, 0)).to(tl.float32))
        tl.store(floats + AMAX, top.to(tl.float32, bitcast=True))
        if COUNTS:
            nothing = tl.sum(zero, 0)
            tl.store(counts, tl.sum(low, 0) - nothing)
            tl.store(counts + 1, nothing)
