"""LAMB and NovoGrad as Triton kernels.

LAMB's update is not stored between its launches but recomputed from the moments, which costs the same traffic and no
memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..storage import LambOptions, NovoGradOptions, Storage, Tensors
from .elementwise import publish
from .launch import (
    FACTOR,
    FIRST,
    GO,
    RATE,
    ROOT,
    address,
    chunk_of,
    launch,
    on,
    parts,
    prepare,
    put,
    take,
    type_of,
    wrote,
)
from .sums import BLOCK, Found, add_up, chunk_norms, of_whole_tensors, one_each


def lamb(storage: Storage, gradients: Tensors, o: LambOptions) -> None:
    """One step of LAMB."""
    device = storage.params[0].device
    decay = float(o.weight_decay)
    inside, outside = (0.0, decay) if o.adam_w_mode else (decay, 0.0)
    with on(device):
        launches = list(parts(storage, gradients))
        norm = None
        if o.max_grad_norm:
            norm = o.grad_norm
            if norm is None:
                squares = [chunk_norms(kind, part, o.factor, squares=True) for kind, part in launches]
                norm = torch.cat(squares).sum(dtype=torch.float64).sqrt() if squares else None
        scalars = prepare(
            device, o, storage.step, betas=o.betas if o.bias_correction else None,
            norm=None if norm is None else norm.to(device, torch.float32), most=o.max_grad_norm or 1.0,
        )  # fmt: skip
        weights = (o.betas[0], o.one_beta1, o.betas[1], 1 - o.betas[1], o.eps)
        found: list[Found] = []
        # zeros: they are summed over ranks even if a skipped step writes nothing
        made = torch.empty if o.shard_sum is None else torch.zeros
        for kind, part in launches:
            partials = made(2 * part.chunks.count if o.trusts else 1, dtype=torch.float32, device=device)
            launch(
                lamb_moments, part, (scalars, partials), (*map(float, weights), inside, outside),
                warps=1, GRAD=type_of(kind.grad), TRUSTS=o.trusts, BLOCK=BLOCK,
            )  # fmt: skip
            found.append((kind, part, part.chunks.first, partials))
        if o.shard_sum is not None and o.trusts:
            numbers = of_whole_tensors(found, storage.params, o.shard_sum, squares=True, each=2)
            found = [
                (kind, part, one_each(part.chunks.tensors, device), numbers[part.table[-1]].flatten())
                for kind, part, _, _ in found
            ]
        for kind, part, first, partials in found:
            ratios = torch.empty(part.chunks.tensors, dtype=torch.float32, device=device)
            if o.trusts:
                lamb_ratios[(part.chunks.tensors,)](
                    scalars, first, partials, ratios, BLOCK=BLOCK, num_warps=1, enable_fp_fusion=False
                )
            launch(
                lamb_apply, part, (scalars, ratios), (float(o.eps), outside),
                LOW=type_of(kind.copy), TRUSTS=o.trusts,
            )  # fmt: skip
    wrote(storage)


def novograd(storage: Storage, gradients: Tensors, o: NovoGradOptions) -> None:
    """One step of NovoGrad."""
    device, step, (norms,) = storage.params[0].device, storage.step, storage.states[1]
    assert step is not None
    squares = o.norm_type == 2
    with on(device):
        scalars = prepare(device, o, step, betas=o.betas if o.bias_correction else None)
        found: list[Found] = [
            (kind, part, part.chunks.first, chunk_norms(kind, part, o.factor, squares=squares))
            for kind, part in parts(storage, gradients, shaped=1)
        ]
        if o.shard_sum is None:
            belows = [
                _below(o, scalars, step, first, part.table, part.table.shape[0] - 1, partials, norms)
                for _, part, first, partials in found
            ]
        else:  # of all parameters at once, since those without elements on this rank have a running norm, too
            numbers = of_whole_tensors(found, storage.params, o.shard_sum, squares=squares, each=1)
            count = len(storage.params)
            places = torch.arange(count, dtype=torch.int64, device=device).unsqueeze(0)
            below = _below(o, scalars, step, one_each(count, device), places, 0, numbers, norms)
            belows = [below[part.table[-1]] for _, part, _, _ in found]
        for (kind, part, _, _), below in zip(found, belows, strict=True):
            launch(
                novograd_kernel, part, (scalars, below),
                (float(o.betas[0]), float(o.one_beta1), float(o.weight_decay)), GRAD=type_of(kind.grad),
                LOW=type_of(kind.copy), INSIDE=o.reg_inside_moment,
            )  # fmt: skip
    wrote(storage)


def _below(
    o: NovoGradOptions, scalars: Tensor, step: Tensor, first: Tensor, table: Tensor, row: int, partials: Tensor,
    norms: Tensor,
) -> Tensor:  # fmt: skip
    """(tensors,): the divisors of gradients or moments. Also updates the running norms."""
    tensors = table.shape[1]
    below = torch.empty(tensors, dtype=torch.float32, device=table.device)
    novograd_norms[(tensors,)](
        scalars, step, first, table, tensors, partials, norms, below, float(o.betas[1]), float(1 - o.betas[1]),
        float(o.eps), SQUARES=o.norm_type == 2, FROM_ZERO=o.init_zero, ROW=row, BLOCK=BLOCK, num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return below


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
def novograd_kernel(
    scalars, below, tensor_of, block_of, sizes, table, tensors, beta1, one_beta1, decay,
    GRAD: tl.constexpr, LOW: tl.constexpr, INSIDE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Step the parameters. Rows: parameters, gradients, first moments, copies if any."""
    if tl.load(scalars + GO) > 0:
        tensor, start, size = chunk_of(tensor_of, block_of, sizes, CHUNK)
        divisor = tl.load(below + tensor)
        for whole in tl.static_range(2):  # whole chunks need no masks
            if (start + CHUNK <= size) == (whole == 1):
                novograd_chunk(
                    scalars, divisor, table, tensors, tensor, start, size, beta1, one_beta1, decay,
                    GRAD, LOW, INSIDE, whole == 1, ALIGNED, CHUNK,
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
    """LAMB's update before trust ratio and learning rate; `decay` is 0 if it went into the gradient."""
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
    """First launch of LAMB. Rows: parameters, gradients, moments 1 and 2, copies if any."""
    if tl.load(scalars + GO) > 0:
        program = tl.program_id(0)
        tensor, start, size = chunk_of(tensor_of, block_of, sizes, CHUNK)
        for whole in tl.static_range(2):  # whole chunks need no masks
            if (start + CHUNK <= size) == (whole == 1):
                lamb_moments_chunk(
                    scalars, partials, program, table, tensors, tensor, start, size, beta1, one_beta1, beta2, one_beta2,
                    eps, inside, decay, GRAD, TRUSTS, BLOCK, whole == 1, ALIGNED, CHUNK,
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
        tensor, start, size = chunk_of(tensor_of, block_of, sizes, CHUNK)
        rate = tl.load(scalars + RATE)
        if TRUSTS:
            rate = rate * tl.load(ratios + tensor)
        for whole in tl.static_range(2):  # whole chunks need no masks
            if (start + CHUNK <= size) == (whole == 1):
                lamb_apply_chunk(
                    scalars, rate, table, tensors, tensor, start, size, eps, decay, LOW, whole == 1, ALIGNED, CHUNK
                )
