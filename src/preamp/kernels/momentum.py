"""Lion and Muon, whose only state is a moment of the gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..formats import cpu_multiplies
from .dispatch import Algorithm, dispatch
from .foreach import Gate, descend, gated, gradients_of, single
from .storage import LionOptions, MuonOptions, RoundedOptions, Storage, Tensors

TOGETHER, TOGETHER_ON_CPU = 2**26, 2**18
"""Elements of matrices that are orthogonalized together: enough for a GPU, and little memory beside the model's. A
CPU's products of many large matrices are slower than those of each.
"""


def lion(storage: Storage, gradients: Tensors, o: LionOptions) -> None:
    """One step of Lion, in place. States: first moments. The rest is as in `adam.adam`.

    `step` is needed for stochastic rounding, and else may be None.
    """
    dispatch(_LION, storage, gradients, o)


def muon(storage: Storage, gradients: Tensors, o: MuonOptions) -> None:
    """One step of Muon, in place. Parameters are matrices. States: first moments. The rest is as in `lion`.

    Matrices of one shape are orthogonalized together.
    """
    before = None if storage.step is None else storage.step.clone()
    if not storage.params:
        return
    most = TOGETHER_ON_CPU if storage.params[0].device.type == "cpu" else TOGETHER
    for places in alike(shapes_of(storage, o), most):
        part = storage.at(places)
        if before is not None and places[0]:
            part.step = before.clone()  # the first call counts the step
        # random numbers depend on the position in a call's list, and calls must not share them
        own = replace(o, seed=o.seed + (places[0] << 31), shards=o.shards and [o.shards[i] for i in places])
        dispatch(_MUON, part, [gradients[i] for i in places], own)


def shapes_of(storage: Storage, o: MuonOptions) -> list[tuple[int, ...]]:
    """The shapes of whole matrices."""
    return [tuple(each.shape) for each in o.shards or storage.params]


def alike(shapes: Sequence[tuple[int, ...]], most: int) -> Iterator[list[int]]:
    """Positions of matrices of one shape, together of `most` elements at most, or single matrices."""
    places: dict[tuple[int, ...], list[int]] = {}
    for i, shape in enumerate(shapes):
        places.setdefault(shape, []).append(i)
    for shape, own in places.items():
        count = max(1, most // max(1, math.prod(shape)))
        yield from (own[i : i + count] for i in range(0, len(own), count))


def updates_of(blended: Tensors, o: MuonOptions) -> list[Tensor]:
    """The updates of bfloat16 matrices of one shape: orthogonalized as whole matrices. `blended` may be overwritten."""
    if o.shards is None:
        return list(orthogonalized(torch.stack(list(blended)), o))
    whole = torch.stack([shard.gather(part) for shard, part in zip(o.shards, blended, strict=True)])
    return [shard.part(each) for shard, each in zip(o.shards, orthogonalized(whole, o), strict=True)]


def orthogonalized(x: Tensor, o: MuonOptions) -> Tensor:
    """(n, rows, columns) bfloat16 matrices, with all singular values brought near 1, by the iteration of Newton and
    Schulz: X <- a X + b (X X^T) X + c (X X^T)^2 X, from X of norm 1. `x` is overwritten.
    """
    if not x.numel():
        return x
    if x.device.type == "cpu" and not cpu_multiplies(x.dtype):
        return orthogonalized(x.float(), o).to(x.dtype)
    (a, b, c), (_, rows, columns) = o.ns_coefficients, x.shape
    x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_min(o.eps))
    for _ in range(o.ns_steps):
        gram = torch.bmm(x.mT, x) if rows > columns else torch.bmm(x, x.mT)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, gram, beta=a) if rows > columns else torch.baddbmm(x, gram, x, beta=a)
    return x


@gated
def _lion(storage: Storage, gradients: Tensors, o: LionOptions, gate: Gate) -> None:
    m, d = gate.draft(storage.states[0]), gradients_of(storage, gradients, o)
    blended = torch._foreach_lerp(m, d, 1 - o.betas[0])
    updates = torch._foreach_sign(blended)
    torch._foreach_add_(updates, blended, alpha=0.0)  # the sign of NaN is 0 in torch, which would hide it
    torch._foreach_lerp_(m, d, 1 - o.betas[1])
    _finish(storage, gate, m, list(updates), o, 1.0)


@gated
def _muon(storage: Storage, gradients: Tensors, o: MuonOptions, gate: Gate) -> None:
    m, d = gate.draft(storage.states[0]), gradients_of(storage, gradients, o)
    torch._foreach_lerp_(m, d, 1 - o.momentum)
    blended = torch._foreach_lerp(d, m, o.momentum) if o.nesterov else m
    low = updates_of([each.to(torch.bfloat16) for each in blended], o)
    _finish(storage, gate, m, [each.to(d[0].dtype) for each in low], o, o.ratio(shapes_of(storage, o)[0]))


def _finish(
    storage: Storage, gate: Gate, firsts: list[Tensor], updates: list[Tensor], o: RoundedOptions, ratio: float
) -> None:
    """Decay parameters, subtract `ratio` learning rates of their updates, and write what was computed."""
    params = gate.draft(storage.params)
    if o.weight_decay:
        torch._foreach_mul_(params, single(1 - gate.rate * o.weight_decay))
    descend(params, updates, single(gate.rate * ratio))
    gate.commit((storage.params, params), (storage.states[0], firsts))


_LION, _MUON = Algorithm(_lion), Algorithm(_muon)
