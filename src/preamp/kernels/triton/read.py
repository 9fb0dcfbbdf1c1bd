"""Reads gradients on the device: one launch of many programs, and a short one that combines their results.

Magnitudes are compared as integers, sign bit off: there infinity and NaN are simply the largest numbers, so one
maximum tells whether everything was finite. Sums are made in a fixed order, without atomics: the same gradients give
the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..lists import TensorList, listed
from .launch import address, chunk_of, on, take
from .tables import parts_of

FOUND = tl.constexpr(0)
NORM = tl.constexpr(1)
INFINITY = tl.constexpr(0x7F800000)

BLOCK = 1024
"""Elements read at a time."""
SHORT = 2 * BLOCK
"""Elements of one program."""
LONG = 16 * BLOCK
"""The same when there is work for all multiprocessors: fewer programs, fewer numbers to combine."""
MANY = 2**23
"""From this many entries on, programs are long."""

KINDS = {torch.float16: (0, tl.int16, 4), torch.bfloat16: (1, tl.int16, 4), torch.float32: (2, tl.int32, 8)}
"""How a dtype is read: the kernel's name for it, the integer of its size, and warps. A thread then takes 16 bytes."""


def readable(gradients: Sequence[Tensor]) -> bool:
    """Whether `read` takes them: strided, of float16, bfloat16 or float32, all on one device."""
    own = listed(gradients)
    return own.strided and own.together and own.dtypes.keys() <= KINDS.keys()


def read(gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Read every entry of `gradients` (one at least, `readable`) once: the fields of a `Reading`.

    A finite float32 or bfloat16 entry does not overflow the norm, whatever its square is. One launch for each dtype,
    and one to finish; views that do not fill their memory are copied first.
    """
    device = gradients[0].device
    dense = own = listed(gradients)
    if None in own.walks:
        filled = zip(own, own.walks, strict=True)
        dense = TensorList(gradient.contiguous() if walk is None else gradient for gradient, walk in filled)
    chunk = LONG if sum(own.sizes) >= MANY else SHORT
    dtypes = own.dtypes
    work = []
    for dtype in dtypes:
        places = [i for i, gradient in enumerate(dense) if gradient.dtype is dtype] if len(dtypes) > 1 else None
        chosen = dense if places is None else [dense[i] for i in places]
        work += [(dtype, part) for part in parts_of([chosen], chunk, places)]
    total = sum(part.chunks.count for _, part in work)
    if not total:
        nothing = torch.zeros((), device=device)
        none = torch.zeros(len(dense), dtype=torch.bool, device=device)
        return nothing, nothing, none

    squares = torch.empty(total, dtype=torch.float64, device=device)
    tops = torch.empty(total, dtype=torch.float32, device=device)
    floats = torch.empty(2, dtype=torch.float32, device=device)
    covered = sum(part.chunks.tensors for _, part in work) == len(dense)
    flags = (torch.empty if covered else torch.zeros)(len(dense), dtype=torch.uint8, device=device)
    with on(device):
        base = 0
        for dtype, part in work:
            chunks, (kind, integer, warps) = part.chunks, KINDS[dtype]
            read_kernel[(chunks.count,)](
                chunks.tensor_of, chunks.block_of, chunks.sizes, part.table, chunks.tensors, base, squares, tops,
                KIND=kind, INTEGER=integer, ALIGNED=part.aligned, CHUNK=chunks.chunk, BLOCK=BLOCK, num_warps=warps,
                enable_fp_fusion=False,
            )  # fmt: skip
            base += chunks.count
        base = 0
        for i, (_, part) in enumerate(work):
            chunks, last = part.chunks, i == len(work) - 1
            finish[(chunks.tensors + last,)](
                chunks.first, part.table, chunks.tensors, base, total, squares, tops, flags, floats, BLOCK=1024,
                num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
            base += chunks.count
    found, norm = floats.unbind()
    return found, norm, flags.view(torch.bool)


@triton.jit
def as_float(bits, KIND: tl.constexpr):
    """Magnitudes as float32, from their bits as integers in float16 (0), bfloat16 (1) or float32 (2)."""
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
    pointer, start, size, spot, squares, tops,
    KIND: tl.constexpr, FULL: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read one chunk, and write its two numbers."""
    top = tl.zeros((BLOCK,), tl.int32)
    total = tl.zeros((BLOCK,), tl.float32)
    length = tl.minimum(size - start, CHUNK).to(tl.int32)
    for block in range(0, CHUNK if FULL else length, BLOCK):
        bits = magnitudes(pointer, start + block + tl.arange(0, BLOCK), size, KIND, FULL)
        values = as_float(bits, KIND)
        top = tl.maximum(top, bits)
        total += values * values
    largest = as_float(tl.max(top, 0), KIND)
    square = tl.sum(total, 0).to(tl.float64)
    if KIND != 0:  # squares of float16 numbers neither overflow nor vanish in float32
        too_big = (largest > 2.0**50) & (largest < float("inf"))
        too_small = (largest < 2.0**-40) & (largest > 0)
        if too_big | too_small:  # rare, so reading the chunk again, scaled by a power of two, costs nothing on average
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


@triton.jit(do_not_specialize=["tensors", "base"])
def read_kernel(
    tensor_of, block_of, sizes, table, tensors, base, squares, tops,
    KIND: tl.constexpr, INTEGER: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each chunk: sum of squares (float64) and largest magnitude (float32). Chunks' numbers begin at `base`."""
    program = tl.program_id(0)
    tensor, start, size = chunk_of(tensor_of, block_of, sizes, CHUNK)
    pointer = address(table, 0, tensors, tensor, INTEGER, ALIGNED)
    if start + CHUNK <= size:
        read_chunk(pointer, start, size, base + program, squares, tops, KIND, True, CHUNK, BLOCK)
    else:
        read_chunk(pointer, start, size, base + program, squares, tops, KIND, False, CHUNK, BLOCK)


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
def finish(first, table, tensors, base, chunks, squares, tops, flags, floats, BLOCK: tl.constexpr):
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
        for block in range(0, chunks, BLOCK):
            places = block + tl.arange(0, BLOCK)
            square += tl.load(squares + places, mask=places < chunks, other=0.0)
        tl.store(floats + FOUND, (top >= INFINITY).to(tl.float32))
        tl.store(floats + NORM, tl.sqrt(tl.sum(square, 0)).to(tl.float32))
