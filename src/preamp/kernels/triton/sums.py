"""Sums and largest magnitudes of whole tensors as Triton kernels, for steps that scale updates by norms.

There are two launches: one computes a number a chunk, the other runs one program a tensor. The order is always the
same, so a step gives the same bits each time. A program that sums is one warp and loops over its chunk block by block,
so no warp waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..storage import ShardSum
from .launch import Kind, address, chunk_of, launch, take, type_of
from .tables import Part

BLOCK = 128
"""Numbers that a summing program, one warp, loads at a time: 16 bytes of float32 a thread."""

Found = tuple[Kind, Part, Tensor, Tensor]
"""A launch, (tensors + 1,) the first chunk of each tensor, and the number of each chunk."""


def chunk_norms(kind: Kind, part: Part, factor: Tensor | None, *, squares: bool) -> Tensor:
    """(chunks,) float32: of the true gradients, each chunk's sum of squares or largest magnitude."""
    device = part.table.device
    partials = torch.empty(part.chunks.count, dtype=torch.float32, device=device)
    launch(
        chunk_norms_kernel, part, (), (partials if factor is None else factor.to(device), partials),
        warps=1, GRAD=type_of(kind.grad), HAS_FACTOR=factor is not None, SQUARES=squares,
        BLOCK=BLOCK * 4 // kind.grad.itemsize,
    )  # fmt: skip
    return partials


def of_whole_tensors(
    found: list[Found], params: Sequence[Tensor], shard_sum: ShardSum, *, squares: bool, each: int
) -> Tensor:
    """(parameters, each) float32: the numbers of every parameter, added up over chunks and ranks."""
    numbers = torch.zeros(len(params), each, dtype=torch.float64, device=params[0].device)
    for _, part, first, partials in found:
        tensor_numbers[(part.chunks.tensors,)](
            first, part.table, part.chunks.tensors, partials, numbers, SQUARES=squares, EACH=each,
            ROW=part.table.shape[0] - 1, BLOCK=BLOCK, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return shard_sum(numbers, not squares).float()


def one_each(tensors: int, device: torch.device) -> Tensor:
    """The first chunks if every tensor is one chunk."""
    return torch.arange(tensors + 1, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["tensors"])
def chunk_norms_kernel(
    tensor_of, block_of, sizes, table, tensors, factor, partials,
    GRAD: tl.constexpr, HAS_FACTOR: tl.constexpr, SQUARES: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """For each chunk of the gradients (row 1), times the factor, the sum of squares or the largest magnitude."""
    program = tl.program_id(0)
    tensor, start, size = chunk_of(tensor_of, block_of, sizes, CHUNK)
    at = start + address(table, 1, tensors, tensor, GRAD, ALIGNED)
    times = tl.full((), 1.0, tl.float32)
    if HAS_FACTOR:
        times = tl.load(factor).to(tl.float32)
    left = tl.minimum(size - start, CHUNK).to(tl.int32)
    if left == CHUNK:
        found = chunk_norm(at, left, times, SQUARES, True, BLOCK, CHUNK)
    else:
        found = chunk_norm(at, left, times, SQUARES, False, BLOCK, CHUNK)
    tl.store(partials + program, found)


@triton.jit
def chunk_norm(
    at, left, times, SQUARES: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """The number of one chunk, from `at` on. The bits of magnitudes order as numbers do, with NaN above all."""
    total = tl.zeros((BLOCK,), tl.float32 if SQUARES else tl.int32)
    for block in tl.static_range(0, CHUNK, BLOCK):
        values = take(at, block + tl.arange(0, BLOCK), left, FULL).to(tl.float32) * times
        if SQUARES:
            total = total + values * values
        else:
            total = tl.maximum(total, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    if SQUARES:
        return tl.sum(total, 0)
    return tl.max(total, 0).to(tl.float32, bitcast=True)


@triton.jit
def add_up(partials, begin, end, EACH: tl.constexpr, SQUARES: tl.constexpr, BLOCK: tl.constexpr):
    """The sum (in float64) or the largest of some chunks' numbers, of which each has `EACH`."""
    total = tl.zeros((BLOCK,), tl.float64)
    for block in range(begin, end, BLOCK):
        places = block + tl.arange(0, BLOCK)
        values = tl.load(partials + EACH * places, mask=places < end, other=0.0).to(tl.float64)
        if SQUARES:
            total = total + values
        else:
            total = tl.maximum(total, values)
    if SQUARES:
        return tl.sum(total, 0)
    return tl.max(total, 0)


@triton.jit(do_not_specialize=["tensors"])
def tensor_numbers(
    first, table, tensors, partials, numbers,
    SQUARES: tl.constexpr, EACH: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up each tensor's chunks, which have `EACH` numbers, and write the sums where the caller counts the tensor."""
    tensor = tl.program_id(0)
    spot = tl.load(table + ROW * tensors + tensor)
    begin = tl.load(first + tensor)
    end = tl.load(first + tensor + 1)
    for number in tl.static_range(EACH):
        total = add_up(partials + number, begin, end, EACH, SQUARES, BLOCK)
        tl.store(numbers + spot * EACH + number, total)
