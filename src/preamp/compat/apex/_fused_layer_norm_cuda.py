"""The operators that toolkits call through `fused_layer_norm_cuda` in autograd functions of their own.

All arguments are positional, and those of the parameters are left out where there are none: `forward(input, shape,
eps)`, `forward_affine(input, shape, weight, bias, eps)`. `input`: any floating dtype; its last dimensions are `shape`,
and all others count as rows. `mean` and `invvar`, which is 1 / sqrt(variance + eps), or 1 / sqrt(mean square + eps) of
an RMS norm, are float32 (float64 for float64), of one number a row. The output has the dtype of the weight, if there is
one, else of `input`. If `memory_efficient`, backward functions take the output of the forward function in the
place of its input, and no mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

Shape = Sequence[int]


def forward(input: Tensor, shape: Shape, *params_and_eps: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm: (output, mean, invvar)."""
    mean = _rows(input, shape).mean(1)
    out, invvar = _normed(_rows(input, shape) - mean[:, None], input, shape, *params_and_eps)
    return out, mean, invvar


def rms_forward(input: Tensor, shape: Shape, *params_and_eps: Any) -> tuple[Tensor, Tensor]:
    """RMS norm: (output, invvar)."""
    return _normed(_rows(input, shape), input, shape, *params_and_eps)


def backward(grad: Tensor, mean: Tensor | None, invvar: Tensor, kept: Tensor, shape: Shape, *more: Any) -> Any:
    """The gradient of `input` of `forward`; those of input, weight and bias, if there are parameters."""
    return _gradients(grad, mean, invvar, kept, shape, more, centred=True)


def rms_backward(grad: Tensor, invvar: Tensor, kept: Tensor, shape: Shape, *more: Any) -> Any:
    """The gradient of `input` of `rms_forward`; those of input and weight, if there is one."""
    return _gradients(grad, None, invvar, kept, shape, more, centred=False)


forward_affine = forward_affine_mixed_dtypes = forward
rms_forward_affine = rms_forward_affine_mixed_dtypes = rms_forward
backward_affine, rms_backward_affine = backward, rms_backward


def _rows(x: Tensor, shape: Shape) -> Tensor:
    return x.reshape(-1, prod(shape)).to(torch.promote_types(x.dtype, torch.float32))


def _normed(rows: Tensor, input: Tensor, shape: Shape, *params_and_eps: Any) -> tuple[Tensor, Tensor]:
    *params, eps = params_and_eps
    invvar = torch.rsqrt(rows.square().mean(1) + eps)
    out = rows * invvar[:, None]
    out = out * _rows(params[0], shape) if params else out
    out = out + _rows(params[1], shape) if len(params) > 1 else out
    return out.view(input.shape).to(params[0].dtype if params else input.dtype), invvar


def _gradients(
    grad: Tensor, mean: Tensor | None, invvar: Tensor, kept: Tensor, shape: Shape, more: Sequence[Any], centred: bool
) -> Any:
    """Those of the input, and of the parameters in `more`, which are followed by eps and perhaps `memory_efficient`."""
    params = [each for each in more if isinstance(each, Tensor)]
    normed, rows, column = _rows(kept, shape), _rows(grad, shape), invvar.view(-1, 1)
    weight = _rows(params[0], shape) if params else None
    if more[-1] is not True:
        normed = (normed if mean is None else normed - mean.view(-1, 1)) * column
    elif weight is not None:  # where it is 0, the output does not tell what was normed, for which Apex takes 0
        normed = normed - _rows(params[1], shape) if len(params) > 1 else normed
        normed = normed / torch.copysign(weight.abs().clamp(min=more[-2]), weight)
    scaled = rows if weight is None else rows * weight
    own = scaled - normed * (scaled * normed).mean(1, keepdim=True)
    own = (own - scaled.mean(1, keepdim=True) if centred else own) * column
    own = own.view(kept.shape).to(kept.dtype)
    sums = ((rows * normed).sum(0), rows.sum(0))
    return (own, *(s.view(tuple(shape)).to(p.dtype) for s, p in zip(sums, params, strict=False))) if params else own
