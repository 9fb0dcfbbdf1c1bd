"""Launching LAMB and NovoGrad. Imports Triton, so import it only where `triton_runs_on`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..multi_tensor import Part
from . import _layerwise_kernels as _kernels
from ._options import LambOptions, Lists, Lows, NovoGradOptions, Whole
from ._triton import Bucket, launch, on, pieces, prepare, type_of, wrote

BLOCK = 128
"""Numbers that a program which adds up, one warp, takes at a time: 16 bytes a thread of float32 ones."""

Surveyed = tuple[Bucket, Part, Tensor, Tensor]
"""A launch, (tensors + 1,) where the chunks of each tensor begin, and what was found in each chunk."""


def lamb(lists: Lists, lows: Lows, step: Tensor, o: LambOptions) -> None:
    """One step of LAMB."""
    device = lists[0][0].device
    decay = float(o.weight_decay)
    inside, outside = (0.0, decay) if o.adam_w_mode else (decay, 0.0)
    with on(device):
        parts = list(pieces(lists, lows))
        norm = None
        if o.max_grad_norm:
            norm = o.grad_norm
            if norm is None:
                found = [_chunk_norms(bucket, part, o.factor, squares=True) for bucket, part in parts]
                norm = torch.cat(found).sum(dtype=torch.float64).sqrt() if found else None
        scalars = prepare(
            device, o, step, betas=o.betas if o.bias_correction else None,
            norm=None if norm is None else norm.to(device, torch.float32), most=o.max_grad_norm or 1.0,
        )  # fmt: skip
        weights = (o.betas[0], o.one_beta1, o.betas[1], 1 - o.betas[1], o.eps)
        surveyed: list[Surveyed] = []
        made = torch.empty if o.whole is None else torch.zeros  # added up also where a skipped step leaves them so
        for bucket, part in parts:
            partials = made(2 * part.plan.chunks if o.trusts else 1, dtype=torch.float32, device=device)
            launch(
                _kernels.lamb_moments, part, (scalars, partials), (*map(float, weights), inside, outside),
                warps=1, GRAD=type_of(bucket.grad), TRUSTS=o.trusts, BLOCK=BLOCK,
            )  # fmt: skip
            surveyed.append((bucket, part, part.plan.first, partials))
        if o.whole is not None and o.trusts:
            numbers = _of_whole(surveyed, lists[0], o.whole, squares=True, each=2)
            surveyed = [
                (bucket, part, _one_each(part.plan.tensors, device), numbers[part.table[-1]].flatten())
                for bucket, part, _, _ in surveyed
            ]
        for bucket, part, first, partials in surveyed:
            ratios = torch.empty(part.plan.tensors, dtype=torch.float32, device=device)
            if o.trusts:
                _kernels.lamb_ratios[(part.plan.tensors,)](
                    scalars, first, partials, ratios, BLOCK=BLOCK, num_warps=1, enable_fp_fusion=False
                )
            launch(
                _kernels.lamb_apply, part, (scalars, ratios), (float(o.eps), outside),
                LOW=type_of(bucket.low), TRUSTS=o.trusts,
            )  # fmt: skip
    wrote(lists[0], lows)


def novograd(lists: Lists, norms: Tensor, lows: Lows, step: Tensor, o: NovoGradOptions) -> None:
    """One step of NovoGrad."""
    device = lists[0][0].device
    squares = o.norm_type == 2
    with on(device):
        scalars = prepare(device, o, step, betas=o.betas if o.bias_correction else None)
        surveyed: list[Surveyed] = [
            (bucket, part, part.plan.first, _chunk_norms(bucket, part, o.factor, squares=squares))
            for bucket, part in pieces(lists, lows)
        ]
        if o.whole is None:
            belows = [
                _below(o, scalars, step, first, part.table, part.table.shape[0] - 1, partials, norms)
                for _, part, first, partials in surveyed
            ]
        else:  # of all parameters at once, as those of which nothing lies here have a running norm, too
            numbers = _of_whole(surveyed, lists[0], o.whole, squares=squares, each=1)
            count = len(lists[0])
            places = torch.arange(count, dtype=torch.int64, device=device).unsqueeze(0)
            below = _below(o, scalars, step, _one_each(count, device), places, 0, numbers, norms)
            belows = [below[part.table[-1]] for _, part, _, _ in surveyed]
        for (bucket, part, _, _), below in zip(surveyed, belows, strict=True):
            launch(
                _kernels.novograd, part, (scalars, below),
                (float(o.betas[0]), float(o.one_beta1), float(o.weight_decay)), GRAD=type_of(bucket.grad),
                LOW=type_of(bucket.low), INSIDE=o.reg_inside_moment,
            )  # fmt: skip
    wrote(lists[0], lows)


def _below(
    o: NovoGradOptions, scalars: Tensor, step: Tensor, first: Tensor, table: Tensor, row: int, partials: Tensor,
    norms: Tensor,
) -> Tensor:  # fmt: skip
    """(tensors,): what gradients or moments are divided by; the running norms are brought up to date."""
    tensors = table.shape[1]
    below = torch.empty(tensors, dtype=torch.float32, device=table.device)
    _kernels.novograd_norms[(tensors,)](
        scalars, step, first, table, tensors, partials, norms, below, float(o.betas[1]), float(1 - o.betas[1]),
        float(o.eps), SQUARES=o.norm_type == 2, FROM_ZERO=o.init_zero, ROW=row, BLOCK=BLOCK, num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return below


def _of_whole(
    surveyed: list[Surveyed], params: Sequence[Tensor], whole: Whole, *, squares: bool, each: int
) -> Tensor:  # fmt: skip
    """(parameters, each) float32: the numbers of every parameter, added up over chunks and processes."""
    numbers = torch.zeros(len(params), each, dtype=torch.float64, device=params[0].device)
    for _, part, first, partials in surveyed:
        _kernels.tensor_numbers[(part.plan.tensors,)](
            first, part.table, part.plan.tensors, partials, numbers, SQUARES=squares, EACH=each,
            ROW=part.table.shape[0] - 1, BLOCK=BLOCK, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return whole(numbers, not squares).float()


def _one_each(tensors: int, device: torch.device) -> Tensor:
    """Where chunks begin if every tensor is one."""
    return torch.arange(tensors + 1, dtype=torch.int32, device=device)


def _chunk_norms(bucket: Bucket, part: Part, factor: Tensor | None, *, squares: bool) -> Tensor:
    """(chunks,) float32: of the true gradients, each chunk's sum of squares or largest magnitude."""
    device = part.table.device
    partials = torch.empty(part.plan.chunks, dtype=torch.float32, device=device)
    launch(
        _kernels.chunk_norms, part, (), (partials if factor is None else factor.to(device), partials),
        warps=1, GRAD=type_of(bucket.grad), HAS_FACTOR=factor is not None, SQUARES=squares,
        BLOCK=BLOCK * 4 // bucket.grad.itemsize,
    )  # fmt: skip
    return partials
