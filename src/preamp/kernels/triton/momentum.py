"""Lion and Muon as Triton kernels, on float32 parameters, on split ones, or on bfloat16 ones rounded stochastically."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..lists import laid_out_like, listed
from ..momentum import orthogonalized, shapes_of, updates_of
from ..storage import LionOptions, MuonOptions, RoundedOptions, Storage, Tensors
from .elementwise import STOCHASTIC, kind_of, publish, put_param, take_param
from .launch import (
    FACTOR,
    GO,
    KEEP,
    RATE,
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


def lion(storage: Storage, gradients: Tensors, o: LionOptions) -> None:
    """Lion, in one launch."""
    kind, betas = kind_of(storage), tuple(float(1 - beta) for beta in o.betas)
    with on(storage.params[0].device):
        scalars = _numbers(storage, o)
        for each, part in parts(storage, gradients):
            launch(
                lion_kernel, part, (scalars,), betas, GRAD=type_of(each.grad), LOW=type_of(each.copy),
                KIND=int(kind.value),
            )  # fmt: skip
    wrote(storage)


def muon(storage: Storage, gradients: Tensors, o: MuonOptions) -> None:
    """Muon on matrices of one shape: a launch for the moments, torch's products, a launch for the parameters."""
    params, (firsts,) = storage.params, storage.states
    kind, ratio = kind_of(storage), float(o.ratio(shapes_of(storage, o)[0]))
    stacked = o.shards is None and (storage.contiguous or listed(params).contiguous)
    with on(params[0].device):
        scalars = _numbers(storage, o)
        stack = params[0].new_empty((len(params), *params[0].shape) if stacked else 0, dtype=torch.bfloat16)
        blended = list(stack) if stacked else [torch.empty_like(first, dtype=torch.bfloat16) for first in firsts]
        for each, part in parts(Storage(blended, (firsts,)), gradients):
            launch(
                muon_moments, part, (scalars,), (float(1 - o.momentum), float(o.momentum)), GRAD=type_of(each.grad),
                NESTEROV=o.nesterov,
            )  # fmt: skip
        if stacked:
            updates: Tensors = list(orthogonalized(stack, o))
        else:
            updates = laid_out_like(params, updates_of(blended, o))
        for each, part in parts(replace(storage, states=()), updates):
            launch(
                muon_apply, part, (scalars,), (ratio,), LOW=type_of(each.copy),
                KIND=int(kind.value),
            )  # fmt: skip
    wrote(storage)


def _numbers(storage: Storage, o: RoundedOptions) -> Tensor:
    """The numbers of a step."""
    rounds = kind_of(storage) is STOCHASTIC
    return prepare(storage.params[0].device, o, storage.step, decay=o.weight_decay, seed=o.seed if rounds else None)


@triton.jit
def lion_chunk(
    scalars, table, tensors, tensor, start, size, one_beta1, one_beta2,
    GRAD: tl.constexpr, LOW: tl.constexpr, KIND: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Step one chunk. Rows: parameters, gradients, moments, copies or low bits if any."""
    places = start + tl.arange(0, CHUNK)
    grad = take(address(table, 1, tensors, tensor, GRAD, ALIGNED), places, size, FULL).to(tl.float32)
    param, param_at, bits_at = take_param(table, 3, tensors, tensor, places, size, KIND, FULL, ALIGNED)
    first_at = address(table, 2, tensors, tensor, tl.float32, ALIGNED)
    first = take(first_at, places, size, FULL)
    grad = grad * tl.load(scalars + FACTOR)
    blended = first + one_beta1 * (grad - first)
    sign = tl.where(blended > 0, 1.0, tl.where(blended < 0, -1.0, 0.0)) + 0.0 * blended  # NaN stays NaN
    param = param * tl.load(scalars + KEEP) - tl.load(scalars + RATE) * sign
    put_param(scalars, table, 3, tensors, tensor, param, param_at, bits_at, places, size, LOW, KIND, FULL, ALIGNED)
    put(first_at, places, first + one_beta2 * (grad - first), size, FULL)


@triton.jit(do_not_specialize=["tensors"])
def lion_kernel(
    scalars, tensor_of, block_of, sizes, table, tensors, one_beta1, one_beta2,
    GRAD: tl.constexpr, LOW: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Lion with decoupled weight decay."""
    if tl.load(scalars + GO) > 0:
        tensor, start, size = chunk_of(tensor_of, block_of, sizes, CHUNK)
        for whole in tl.static_range(2):  # whole chunks need no masks
            if (start + CHUNK <= size) == (whole == 1):
                lion_chunk(
                    scalars, table, tensors, tensor, start, size, one_beta1, one_beta2, GRAD, LOW, KIND, whole == 1,
                    ALIGNED, CHUNK,
                )  # fmt: skip


@triton.jit
def muon_moments_chunk(
    scalars, table, tensors, tensor, start, size, one_momentum, momentum,
    GRAD: tl.constexpr, NESTEROV: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The moment of one chunk, and what is to be orthogonalized. Rows: that, gradients, moments."""
    places = start + tl.arange(0, CHUNK)
    grad = take(address(table, 1, tensors, tensor, GRAD, ALIGNED), places, size, FULL).to(tl.float32)
    first_at = address(table, 2, tensors, tensor, tl.float32, ALIGNED)
    first = take(first_at, places, size, FULL)
    grad = grad * tl.load(scalars + FACTOR)
    first = first + one_momentum * (grad - first)
    blended = grad + momentum * (first - grad) if NESTEROV else first
    publish(table, 0, tensors, tensor, places, blended, size, tl.bfloat16, FULL, ALIGNED)
    put(first_at, places, first, size, FULL)


@triton.jit(do_not_specialize=["tensors"])
def muon_moments(
    scalars, tensor_of, block_of, sizes, table, tensors, one_momentum, momentum,
    GRAD: tl.constexpr, NESTEROV: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """First launch of Muon."""
    if tl.load(scalars + GO) > 0:
        tensor, start, size = chunk_of(tensor_of, block_of, sizes, CHUNK)
        for whole in tl.static_range(2):  # whole chunks need no masks
            if (start + CHUNK <= size) == (whole == 1):
                muon_moments_chunk(
                    scalars, table, tensors, tensor, start, size, one_momentum, momentum, GRAD, NESTEROV, whole == 1,
                    ALIGNED, CHUNK,
                )  # fmt: skip


@triton.jit
def muon_apply_chunk(
    scalars, table, tensors, tensor, start, size, ratio,
    LOW: tl.constexpr, KIND: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Step one chunk. Rows: parameters, updates, copies or low bits if any."""
    places = start + tl.arange(0, CHUNK)
    update = take(address(table, 1, tensors, tensor, tl.bfloat16, ALIGNED), places, size, FULL).to(tl.float32)
    param, param_at, bits_at = take_param(table, 2, tensors, tensor, places, size, KIND, FULL, ALIGNED)
    param = param * tl.load(scalars + KEEP) - tl.load(scalars + RATE) * ratio * update
    put_param(scalars, table, 2, tensors, tensor, param, param_at, bits_at, places, size, LOW, KIND, FULL, ALIGNED)


@triton.jit(do_not_specialize=["tensors"])
def muon_apply(
    scalars, tensor_of, block_of, sizes, table, tensors, ratio,
    LOW: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Last launch of Muon: the parameters, with decoupled weight decay."""
    if tl.load(scalars + GO) > 0:
        tensor, start, size = chunk_of(tensor_of, block_of, sizes, CHUNK)
        for whole in tl.static_range(2):  # whole chunks need no masks
            if (start + CHUNK <= size) == (whole == 1):
                muon_apply_chunk(
                    scalars, table, tensors, tensor, start, size, ratio, LOW, KIND, whole == 1, ALIGNED, CHUNK
                )
