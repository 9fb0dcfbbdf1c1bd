"""LAMB and NovoGrad as Triton kernels: sums over each tensor, and the steps that use them.

Sums are made in two launches, one number a chunk and then one program a tensor, always in the same order, so that a
step gives the same bits each time. A program that adds up is one warp and goes through its chunk block by block, so
that no warp waits for another. LAMB's update is not stored between its launches but made again from the moments,
which costs the same traffic and no memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..multi_tensor.device import address, put, start_of, take
from ._kernels import FACTOR, FIRST, GO, RATE, ROOT, publish


@triton.jit(do_not_specialize=["tensors"])
def chunk_norms(
    tensor_of, block_of, sizes, table, tensors, factor, partials,
    GRAD: tl.constexpr, HAS_FACTOR: tl.constexpr, SQUARES: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """For each chunk of the gradients (row 1), times the factor, the sum of squares or the largest magnitude."""
    program = tl.program_id(0)
    tensor = tl.load(tensor_of + program)
    start = start_of(block_of, program, CHUNK)
    size = tl.load(sizes + tensor)
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
    """Of one chunk, from `at` on. The bits of magnitudes order as numbers do, and NaN above all."""
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


@triton.jit(do_not_specialize=["tensors"])
def novograd_norms(
    scalars, step, first, table, tensors, partials, norms, below, beta2, one_beta2, eps,
    SQUARES: tl.constexpr, FROM_ZERO: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Blend each tensor's norm into the running one, and write what its gradient or moment is divided by."""
    if tl.load(scalars + GO) > 0:
        tensor = tl.program_id(0)
        total = add_up(partials, tl.load(first + tensor), tl.load(first + tensor + 1), 1, SQUARES, BLOCK)
        spot = tl.load(table + ROW * tensors + tensor)
        before = tl.load(norms + spot)
        now = total.to(tl.float32)
        if SQUARES:
            now = tl.sqrt(total).to(tl.float32)
        if tl.load(step) < 1.5:  # `prepare` has counted this step already
            before = now * 0.0 if FROM_ZERO else now
        if SQUARES:
            blended = tl.sqrt_rn(beta2 * (before * before) + one_beta2 * (now * now))
        else:
            blended = beta2 * before + one_beta2 * now
        tl.store(norms + spot, blended)
        tl.store(below + tensor, blended * tl.load(scalars + ROOT) + eps)


@triton.jit(do_not_specialize=["tensors"])
def novograd(
    scalars, below, tensor_of, block_of, sizes, table, tensors, beta1, one_beta1, decay,
    GRAD: tl.constexpr, LOW: tl.constexpr, INSIDE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Step the parameters. Rows: parameters, gradients, first moments, twins if any."""
    if tl.load(scalars + GO) > 0:
        program = tl.program_id(0)
        tensor = tl.load(tensor_of + program)
        start = start_of(block_of, program, CHUNK)
        size = tl.load(sizes + tensor)
        divisor = tl.load(below + tensor)
        if start + CHUNK <= size:
            novograd_chunk(
                scalars, divisor, table, tensors, tensor, start, size, beta1, one_beta1, decay,
                GRAD, LOW, INSIDE, True, ALIGNED, CHUNK,
            )  # fmt: skip
        else:
            novograd_chunk(
                scalars, divisor, table, tensors, tensor, start, size, beta1, one_beta1, decay,
                GRAD, LOW, INSIDE, False, ALIGNED, CHUNK,
            )  # fmt: skip


@triton.jit
def novograd_chunk(
    scalars, divisor, table, tensors, tensor, start, size, beta1, one_beta1, decay,
    GRAD: tl.constexpr, LOW: tl.constexpr, INSIDE: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Step one chunk."""
    places = start + tl.arange(0, CHUNK)
    param_at = address(table, 0, tensors, tensor, tl.float32, ALIGNED)
    first_at = address(table, 2, tensors, tensor, tl.float32, ALIGNED)
    param = take(param_at, places, size, FULL)
    grad = take(address(table, 1, tensors, tensor, GRAD, ALIGNED), places, size, FULL).to(tl.float32)
    grad = grad * tl.load(scalars + FACTOR)
    if INSIDE:
        grad = tl.div_rn(grad, divisor) + decay * param
    first = beta1 * take(first_at, places, size, FULL) + one_beta1 * grad
    update = first * tl.load(scalars + FIRST)
    if not INSIDE:
        update = tl.div_rn(update, divisor) + decay * param
    param = param - tl.load(scalars + RATE) * update
    if LOW is not None:
        publish(table, 3, tensors, tensor, places, param, size, LOW, FULL, ALIGNED)
    put(param_at, places, param, size, FULL)
    put(first_at, places, first, size, FULL)


@triton.jit
def lamb_update(scalars, param, first, second, eps, decay):
    """What LAMB would subtract, before trust ratio and learning rate; `decay` is 0 if it went into the gradient."""
    below = tl.sqrt_rn(second) * tl.load(scalars + ROOT) + eps
    return tl.div_rn(first * tl.load(scalars + FIRST), below) + decay * param


@triton.jit
def lamb_moments_chunk(
    scalars, partials, program, table, tensors, tensor, start, size, beta1, one_beta1, beta2, one_beta2, eps, inside,
    decay, GRAD: tl.constexpr, TRUSTS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The moments of one chunk, and its share of the two norms."""
    param_at = start + address(table, 0, tensors, tensor, tl.float32, ALIGNED)
    grad_at = start + address(table, 1, tensors, tensor, GRAD, ALIGNED)
    first_at = start + address(table, 2, tensors, tensor, tl.float32, ALIGNED)
    second_at = start + address(table, 3, tensors, tensor, tl.float32, ALIGNED)
    factor = tl.load(scalars + FACTOR)
    left = tl.minimum(size - start, CHUNK).to(tl.int32)
    own = tl.zeros((BLOCK,), tl.float32)
    moved = tl.zeros((BLOCK,), tl.float32)
    for block in range(0, CHUNK if FULL else left, BLOCK):
        places = block + tl.arange(0, BLOCK)
        param = take(param_at, places, left, FULL)
        grad = take(grad_at, places, left, FULL).to(tl.float32) * factor + inside * param
        first = beta1 * take(first_at, places, left, FULL) + one_beta1 * grad
        second = beta2 * take(second_at, places, left, FULL) + one_beta2 * (grad * grad)
        if TRUSTS:
            update = lamb_update(scalars, param, first, second, eps, decay)
            if not FULL:
                update = tl.where(places < left, update, 0.0)
            own = own + param * param
            moved = moved + update * update
        put(first_at, places, first, left, FULL)
        put(second_at, places, second, left, FULL)
    if TRUSTS:
        tl.store(partials + 2 * program, tl.sum(own, 0))
        tl.store(partials + 2 * program + 1, tl.sum(moved, 0))


@triton.jit(do_not_specialize=["tensors"])
def lamb_moments(
    scalars, partials, tensor_of, block_of, sizes, table, tensors, beta1, one_beta1, beta2, one_beta2, eps, inside,
    decay, GRAD: tl.constexpr, TRUSTS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """First launch of LAMB. Rows: parameters, gradients, moments 1 and 2, twins if any."""
    if tl.load(scalars + GO) > 0:
        program = tl.program_id(0)
        tensor = tl.load(tensor_of + program)
        start = start_of(block_of, program, CHUNK)
        size = tl.load(sizes + tensor)
        if start + CHUNK <= size:
            lamb_moments_chunk(
                scalars, partials, program, table, tensors, tensor, start, size, beta1, one_beta1, beta2, one_beta2,
                eps, inside, decay, GRAD, TRUSTS, BLOCK, True, ALIGNED, CHUNK,
            )  # fmt: skip
        else:
            lamb_moments_chunk(
                scalars, partials, program, table, tensors, tensor, start, size, beta1, one_beta1, beta2, one_beta2,
                eps, inside, decay, GRAD, TRUSTS, BLOCK, False, ALIGNED, CHUNK,
            )  # fmt: skip


@triton.jit
def lamb_ratios(scalars, first, partials, ratios, BLOCK: tl.constexpr):
    """Each tensor's trust ratio: norm of the parameter over norm of the update, 1 where either is 0."""
    if tl.load(scalars + GO) > 0:
        tensor = tl.program_id(0)
        begin = tl.load(first + tensor)
        end = tl.load(first + tensor + 1)
        above = add_up(partials, begin, end, 2, True, BLOCK)
        below = add_up(partials + 1, begin, end, 2, True, BLOCK)
        good = (above > 0) & (below > 0)
        ratio = tl.sqrt(tl.where(good, above, 1.0) / tl.where(good, below, 1.0))
        tl.store(ratios + tensor, ratio.to(tl.float32))


@triton.jit
def lamb_apply_chunk(
    scalars, rate, table, tensors, tensor, start, size, eps, decay,
    LOW: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Step one chunk from its moments."""
    places = start + tl.arange(0, CHUNK)
    param_at = address(table, 0, tensors, tensor, tl.float32, ALIGNED)
    first = take(address(table, 2, tensors, tensor, tl.float32, ALIGNED), places, size, FULL)
    second = take(address(table, 3, tensors, tensor, tl.float32, ALIGNED), places, size, FULL)
    param = take(param_at, places, size, FULL)
    param = param - rate * lamb_update(scalars, param, first, second, eps, decay)
    if LOW is not None:
        publish(table, 4, tensors, tensor, places, param, size, LOW, FULL, ALIGNED)
    put(param_at, places, param, size, FULL)


@triton.jit(do_not_specialize=["tensors"])
def lamb_apply(
    scalars, ratios, tensor_of, block_of, sizes, table, tensors, eps, decay,
    LOW: tl.constexpr, TRUSTS: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Last launch of LAMB: the parameters."""
    if tl.load(scalars + GO) > 0:
        program = tl.program_id(0)
        tensor = tl.load(tensor_of + program)
        start = start_of(block_of, program, CHUNK)
        size = tl.load(sizes + tensor)
        rate = tl.load(scalars + RATE)
        if TRUSTS:
            rate = rate * tl.load(ratios + tensor)
        if start + CHUNK <= size:
            lamb_apply_chunk(scalars, rate, table, tensors, tensor, start, size, eps, decay, LOW, True, ALIGNED, CHUNK)
        else:
            lamb_apply_chunk(scalars, rate, table, tensors, tensor, start, size, eps, decay, LOW, False, ALIGNED, CHUNK)
