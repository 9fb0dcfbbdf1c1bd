"""Batch norm over the joined batch of all ranks, forward and backward, for batches of any sizes, empty ones included.

Each rank reduces its share to mean, sum of squared deviations M2 and count n, in float32 or better. The joined
moments follow from Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances"
(1979): with N = sum n_i and mean = sum n_i mean_i / N,

    M2 = sum (M2_i + n_i (mean_i - mean)^2).

Deviations are taken from a mean, never as E[x^2] - E[x]^2, which cancels for data far from zero. The backward is that
of Ioffe and Szegedy, "Batch Normalization" (2015), with its two sums taken over all ranks:

    dx = weight / std * (dy - sum(dy) / N - xhat * sum(dy * xhat) / N).

One all-gather forward, one all-reduce backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._collectives import Group


def joined_moments(
    local_mean: Tensor, local_m2: Tensor, local_count: int, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """The moments of all ranks' batches together, from each rank's own; a rank without elements gives zeros.

    Mean and biased variance, of shape (C,), and the number of elements; float32 or float64.
    """
    mine = torch.cat([local_mean, local_m2, local_mean.new_full((1,), float(local_count))])
    gathered = mine.new_empty(dist.get_world_size(group), mine.numel())
    dist.all_gather(list(gathered.unbind(0)), mine, group=group)
    channels = local_mean.numel()
    means, m2s, counts = gathered.split([channels, channels, 1], dim=1)
    count = counts.sum()
    divisor = count.clamp(min=1.0)  # a step in which no rank has data yields zeros rather than NaN
    mean = (counts * means).sum(0) / divisor
    m2 = (m2s + counts * (means - mean).square()).sum(0)
    return mean, m2 / divisor, count


def _own_moments(x: Tensor, statistics: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """Mean, sum of squared deviations and number of elements of each channel of `x`, in the dtype `statistics`."""
    channels = x.shape[1]
    count = x.numel() // channels if channels else 0
    if count == 0:
        zeros = torch.zeros(channels, dtype=statistics, device=x.device)
        return zeros, zeros, 0
    var, mean = torch.var_mean(x.to(statistics), dim=_others(x), correction=0)
    return mean, var * count, count


def _others(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


class SyncBatchnormFunction(torch.autograd.Function):
    """Normalise, scale and shift.

    apply(input, weight, bias, eps, group) -> (output, mean, var, total). `input`: any floating dtype, channels along
    axis 1; `weight`, `bias`: (C,) or None. `output` has the input's dtype and shape, computed in float32 or better and
    rounded once. `mean`, `var` (biased) and `total` are the joined moments, without gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Group
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One all-gather of 2C + 1 numbers per rank."""
        statistics = torch.promote_types(x.dtype, torch.float32)
        mean, var, total = joined_moments(*_own_moments(x, statistics), group)
        inverse = torch.rsqrt(var + eps)
        shape = [1, -1, *[1] * (x.dim() - 2)]
        scale = inverse if weight is None else inverse * weight.to(statistics)
        y = (x.to(statistics) - mean.view(shape)) * scale.view(shape)
        if bias is not None:
            y += bias.to(statistics).view(shape)
        ctx.save_for_backward(x, weight, mean, inverse, total)
        ctx.group, ctx.bias_dtype = group, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, var, total)
        return y.to(x.dtype), mean, var, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """One all-reduce of 2C numbers, left out where the input needs no gradient."""
        x, weight, mean, inverse, count = ctx.saved_tensors
        statistics, shape, others = mean.dtype, [1, -1, *[1] * (x.dim() - 2)], _others(x)
        dy = dy.to(statistics)
        xhat = (x.to(statistics) - mean.view(shape)) * inverse.view(shape)
        sum_dy, sum_dy_xhat = dy.sum(others), (dy * xhat).sum(others)
        dweight = sum_dy_xhat.to(weight.dtype) if ctx.needs_input_grad[1] else None
        dbias = sum_dy.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        dx = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([sum_dy, sum_dy_xhat])
            dist.all_reduce(sums, group=ctx.group)
            mean_dy, mean_dy_xhat = (sums / count.clamp(min=1.0)).chunk(2)
            scale = inverse if weight is None else inverse * weight.to(statistics)
            dx = (dy - mean_dy.view(shape) - xhat * mean_dy_xhat.view(shape)) * scale.view(shape)
            dx = dx.to(x.dtype)
        return dx, dweight, dbias, None, None
