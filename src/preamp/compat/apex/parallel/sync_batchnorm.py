"""Batch norm over the joined batch of all ranks, for batches of any sizes, and the conversion of a network to it.

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

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from .._notice import deprecated_warning, has_group
from .distributed import require_group

Group = Any  # dist.ProcessGroup; None stands for the default group. Absent where torch has no distributed


def joined_moments(x: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance of each channel over the batches of all ranks, (C,), and the number of elements of one.

    float32 or float64; zeros where no rank has an element.
    """
    channels, statistics = x.shape[1], torch.promote_types(x.dtype, torch.float32)
    own_count = x.numel() // max(channels, 1)
    mean = m2 = torch.zeros(channels, dtype=statistics, device=x.device)
    if own_count:
        var, mean = torch.var_mean(x.to(statistics), dim=[0, *range(2, x.dim())], correction=0)
        m2 = var * own_count
    mine = torch.cat([mean, m2, mean.new_full((1,), float(own_count))])
    gathered = mine.new_empty(dist.get_world_size(group), mine.numel())
    dist.all_gather(list(gathered.unbind(0)), mine, group=group)
    means, m2s, counts = gathered.split([channels, channels, 1], dim=1)
    count = counts.sum()
    divisor = count.clamp(min=1.0)  # a step in which no rank has data yields zeros rather than NaN
    mean = (counts * means).sum(0) / divisor
    m2 = (m2s + counts * (means - mean).square()).sum(0)
    return mean, m2 / divisor, count


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
        mean, var, total = joined_moments(x, group)
        statistics = mean.dtype
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
        statistics, shape, others = mean.dtype, [1, -1, *[1] * (x.dim() - 2)], [0, *range(2, x.dim())]
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


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose statistics, in training, are those of the joined batch of all ranks of `process_group`.

    Batches may differ in size between ranks, or be empty: mean and variance are weighted by counts, forward and
    backward equal one BatchNorm over the concatenated batch, and the running variance is unbiased by the joint
    count. `momentum=None` keeps a cumulative average. In evaluation, without a process group, or in a group of one,
    it is plain batch norm.

    `channel_last`: channels are the last axis of the tensor, as in an NHWC layout, instead of axis 1 (tensors in
    torch's channels_last memory format have theirs on axis 1). `fuse_relu`: ReLU after everything else.
    """

    process_group: Group = None  # these are what layers have that Apex pickled before it had them
    channel_last: bool = False
    fuse_relu: bool = False

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
        track_running_stats: bool = True, process_group: Group = None, channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """relu(batch_norm(input) + z), the ReLU only with `fuse_relu` and `z` only if given.

        `input`: floating dtype, (N, C), (N, C, L), (N, C, H, W) or (N, C, D, H, W), or with C last if `channel_last`.
        `z`: shape of `input`. Returns dtype and shape of `input`; float16 and bfloat16 are normalised in float32.
        ValueError for other shapes.
        """
        axis = self._axis_of_channels(input)
        x = input.movedim(axis, 1)
        if not self.training or not has_group() or dist.get_world_size(self.process_group) <= 1:
            output = super().forward(x)
        else:
            output, mean, var, count = SyncBatchnormFunction.apply(
                x, self.weight, self.bias, self.eps, self.process_group
            )
            self._track(mean, var, count)
        output = output.movedim(1, axis)
        output = output if z is None else output + z
        return (output.relu() if self.fuse_relu else output).to(input.dtype)

    def _check_input_dim(self, input: Tensor) -> None:
        """Torch's own check, of which `_axis_of_channels` takes the place."""

    def _axis_of_channels(self, input: Tensor) -> int:
        """The axis of the channels; ValueError unless the shape fits."""
        axis = input.dim() - 1 if self.channel_last else 1
        if not 2 <= input.dim() <= 5 or input.shape[axis] != self.num_features:
            place = "the last axis" if self.channel_last else "axis 1"
            raise ValueError(
                f"SyncBatchNorm({self.num_features}) got an input of shape {tuple(input.shape)}: it takes 2 to 5 axes "
                f"with {self.num_features} channels along {place} (channel_last={self.channel_last})."
            )
        return axis

    def _count_batch(self) -> float:
        """Count one more batch; the weight of its statistics in the running ones."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return self.momentum or 0.0

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Move the running statistics towards the joined ones; not at all when no rank had any data."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        weight = (count > 0).to(mean.dtype) * self._count_batch()
        unbiased = var * (count / (count - 1).clamp(min=1.0))
        for running, seen in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_(running.to(seen.dtype).lerp(seen, weight))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": None}  # a group means nothing in another process: the default one

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin.process_group = self.process_group  # same process, same group
        return twin


def convert_syncbn_model(module: nn.Module, process_group: Group = None, channel_last: bool = False) -> nn.Module:
    """Replace every batch norm in `module`, or `module` itself, by a `SyncBatchNorm`; returns the converted module.

    Instance norms stay. The new layers hold the very same parameters and running buffers, so an optimizer built
    before still trains them, and keep mode, hooks, dtype and device; a layer used in two places stays one layer.
    Without anything to convert, `module` is returned as it is.
    """
    deprecated_warning(
        "apex.parallel.convert_syncbn_model is deprecated by NVIDIA; its successor in torch is "
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm."
    )
    return _convert(module, process_group, channel_last, {})


def _convert(module: nn.Module, group: Group, channel_last: bool, done: dict[int, nn.Module]) -> nn.Module:
    if id(module) in done:
        return done[id(module)]
    converted = module
    if isinstance(module, SyncBatchNorm):
        if group is not None or channel_last:
            module.process_group, module.channel_last = group, channel_last
    elif isinstance(module, _BatchNorm) and not isinstance(module, _InstanceNorm):
        converted = _synchronised(module, group, channel_last)
    done[id(module)] = converted
    for name, child in list(converted._modules.items()):
        if child is not None:
            converted._modules[name] = _convert(child, group, channel_last, done)
    return converted


def _synchronised(layer: _BatchNorm, group: Group, channel_last: bool) -> SyncBatchNorm:
    made = SyncBatchNorm.__new__(SyncBatchNorm)
    # Everything a module has is in its __dict__, hooks included; the old layer keeps registries of its own.
    made.__dict__ = layer.__dict__.copy()
    made._parameters, made._buffers = layer._parameters.copy(), layer._buffers.copy()
    made.process_group, made.channel_last, made.fuse_relu = group, channel_last, False
    return made


def create_syncbn_process_group(group_size: int) -> Group:
    """Split the ranks into groups of `group_size` neighbours; returns this rank's group. Every rank has to call it.

    0 means all ranks: returns None. ValueError unless the world size is a multiple of `group_size`.
    """
    if group_size == 0:
        return None
    require_group("create_syncbn_process_group")
    group, _ = dist.new_subgroups(group_size)
    return group
