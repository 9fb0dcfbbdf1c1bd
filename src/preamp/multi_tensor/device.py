"""What kernels over many tensors share on the device. Imports Triton, so import it only where `triton_runs_on`.

A program finds its tensor and its place in it by the plan, and the addresses in the table. Chunks that are full are
worked on without masks and, with aligned addresses, by vector loads; a start that is a multiple of the chunk's length
and an address marked as aligned are what the compiler needs to see for that.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def start_of(block_of, program, CHUNK: tl.constexpr):
    """The first element of a program's chunk, int64."""
    return tl.load(block_of + program).to(tl.int64) * CHUNK


@triton.jit
def address(table, row, tensors, tensor, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to elements of `TYPE` from a row of the table."""
    pointer = tl.load(table + row * tensors + tensor).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def take(pointer, places, size, FULL: tl.constexpr):
    """Load elements; beyond the end of the tensor there are zeros."""
    if FULL:
        return tl.load(pointer + places)
    return tl.load(pointer + places, mask=places < size, other=0)


@triton.jit
def put(pointer, places, values, size, FULL: tl.constexpr):
    """Store elements, none beyond the end of the tensor."""
    if FULL:
        tl.store(pointer + places, values)
    else:
        tl.store(pointer + places, values, mask=places < size)
