"""Gradients of norms under `torch.vmap`, whose own rules for them want one dtype.

The kernel of a norm takes 16-bit activations with float32 weights and statistics, and so does that of its gradient.
Under vmap (a Jacobian, gradients of single samples) torch takes the latter apart and calls it again with a product of
gradient and weight, which is float32, beside the 16-bit activations: an error. Here it is taken apart in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._held import HeldKernels, library_of

Gradients = tuple[Tensor, Tensor, Tensor]
"""Of a norm's input, weight and bias."""


class Vmapped(HeldKernels):
    """The rules of vmap that are in the dispatcher now. There is one (`VMAPPED`), because there is one dispatcher."""

    def install(self) -> None:
        """Put the rules in the place of torch's."""
        if self._holders and not self._libraries:
            rules = [(name, rule) for name, rule in _RULES.items() if hasattr(torch.ops.aten, name)]
            self._libraries["aten"] = [library_of(rules, "FuncTorchBatched", with_keyset=False)]


VMAPPED = Vmapped()


def _layer_norm(
    gradient: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, scale: Tensor, weight: Tensor | None, *_: Any
) -> Gradients:
    outer = tuple(range(x.dim() - len(shape)))
    return _through(gradient, x, mean, scale, weight, over=tuple(range(len(outer), x.dim())), outer=outer)


def _group_norm(
    gradient: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, n: int, c: int, size: int,
    groups: int, *_: Any,
) -> Gradients:  # fmt: skip
    grouped, of_group, of_channel = (n, groups, c // groups, size), (n, groups, 1, 1), (groups, c // groups, 1)
    of_input, of_weight, of_bias = _through(
        gradient.reshape(grouped), x.reshape(grouped), mean.reshape(of_group), scale.reshape(of_group),
        None if weight is None else weight.reshape(of_channel), over=(2, 3), outer=(0, 3),
    )  # fmt: skip
    return of_input.reshape(x.shape), of_weight.reshape(c), of_bias.reshape(c)


def _batch_norm(
    gradient: Tensor, x: Tensor, weight: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    mean: Tensor | None, scale: Tensor | None, train: bool, eps: float, *_: Any,
) -> Gradients:  # fmt: skip
    if not train:
        assert running_mean is not None and running_var is not None
        mean, scale = running_mean.float(), (running_var.float() + eps).rsqrt()
    assert mean is not None and scale is not None
    of_channel = (-1, *[1] * (x.dim() - 2))
    over = (0, *range(2, x.dim()))
    wide = None if weight is None else weight.reshape(of_channel)
    return _through(
        gradient, x, mean.reshape(of_channel), scale.reshape(of_channel), wide, over=over if train else (), outer=over
    )


def _of_device(x: Tensor, gradient: Tensor, weight: Tensor, *statistics: Any) -> Gradients:
    """As the libraries of devices have it: of a pass in training, with the root's inverse as the variance."""
    running_mean, running_var, mean, scale, eps, *_ = statistics
    return _batch_norm(gradient, x, weight, running_mean, running_var, mean, scale, train=True, eps=eps)


def _through(
    gradient: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, *, over: tuple[int, ...],
    outer: tuple[int, ...],
) -> Gradients:  # fmt: skip
    """Gradients of y = weight * n + bias with n = (x - mean) * scale, sums in float32.

    `over`: the dimensions over which mean and scale are those of x; none: they are constants. `outer`: those over which
    weight and bias are repeated.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, x_wide = gradient.to(dtype), x.to(dtype)
    if over:  # functions of x, which second derivatives pass through; what is saved are their values
        mean = x_wide.mean(over, keepdim=True)
        var = (x_wide - mean).square().mean(over, keepdim=True)
        scale = scale * (1 + scale.square() * (var - var.detach())).rsqrt()
    normed = (x_wide - mean) * scale
    of_input = inner = wide if weight is None else wide * weight.to(dtype)
    if over:
        of_input = inner - inner.mean(over, keepdim=True) - normed * (inner * normed).mean(over, keepdim=True)
    of_weight, of_bias = ((each.sum(outer) if outer else each) for each in (wide * normed, wide))
    kept = dtype if weight is None else weight.dtype
    return (of_input * scale).to(x.dtype), of_weight.to(kept), of_bias.to(kept)


_RULES = {
    "native_layer_norm_backward": _layer_norm, "native_group_norm_backward": _group_norm,
    "native_batch_norm_backward": _batch_norm, "batch_norm_backward": _batch_norm,
    "cudnn_batch_norm_backward": _of_device, "miopen_batch_norm_backward": _of_device,
}  # fmt: skip
