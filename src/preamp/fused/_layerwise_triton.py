"""Launching LAMB and NovoGrad. Imports Triton, so import it only where `triton_runs_on`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..multi_tensor import Part
from . import _layerwise_kernels as _kernels
from ._options import LambOptions, Lists, Lows, NovoGradOptions
from ._triton import Bucket, launch, on, pieces, prepare, type_of, wrote

BLOCK = 1024
"""How many chunks' numbers a program adds up at a time."""


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
        for bucket, part in parts:
            partials = torch.empty(2 * part.plan.chunks if o.trusts else 1, dtype=torch.float32, device=device)
            ratios = torch.empty(part.plan.tensors, dtype=torch.float32, device=device)
            launch(
                _kernels.lamb_moments, part, (scalars, partials), (*map(float, weights), inside, outside),
                GRAD=type_of(bucket.grad), TRUSTS=o.trusts,
            )  # fmt: skip
            if o.trusts:
                _kernels.lamb_ratios[(part.plan.tensors,)](
                    scalars, part.plan.first, partials, ratios, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False
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
        for bucket, part in pieces(lists, lows):
            partials = _chunk_norms(bucket, part, o.factor, squares=squares)
            below = torch.empty(part.plan.tensors, dtype=torch.float32, device=device)
            _kernels.novograd_norms[(part.plan.tensors,)](
                scalars, step, part.plan.first, part.table, part.plan.tensors, partials, norms, below,
                float(o.betas[1]), float(1 - o.betas[1]), float(o.eps), SQUARES=squares, FROM_ZERO=o.init_zero,
                ROW=part.table.shape[0] - 1, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
            launch(
                _kernels.novograd, part, (scalars, below),
                (float(o.betas[0]), float(o.one_beta1), float(o.weight_decay)), GRAD=type_of(bucket.grad),
                LOW=type_of(bucket.low), INSIDE=o.reg_inside_moment,
            )  # fmt: skip
    wrote(lists[0], lows)


def _chunk_norms(bucket: Bucket, part: Part, factor: Tensor | None, *, squares: bool) -> Tensor:
    """(chunks,) float32: of the true gradients, each chunk's sum of squares or largest magnitude."""
    device = part.table.device
    partials = torch.empty(part.plan.chunks, dtype=torch.float32, device=device)
    launch(
        _kernels.chunk_norms, part, (), (partials if factor is None else factor.to(device), partials),
        GRAD=type_of(bucket.grad), HAS_FACTOR=factor is not None, SQUARES=squares,
    )  # fmt: skip
    return partials
