"""The operators that toolkits call through `fused_layer_norm_cuda` in autograd functions of their own.

`input`: any floating dtype; its last dimensions are `shape`, and all others count as rows. `mean` and `invvar`, which
is 1 / sqrt(variance + eps), or 1 / sqrt(mean square + eps) of an RMS norm, are float32 (float64 for float64), of one
number a row. Results have the dtype of `input`; of `weight` in the `mixed_dtypes` functions. If `memory_efficient`,
backward functions take the output of the forward function in the place of its input, and no mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

Shape = Sequence[int]
Given = Tensor | None


def forward(input: Tensor, shape: Shape, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm without parameters: (output, mean, invvar)."""
    return _layer_norm(input, shape, None, None, eps, input.dtype)


def forward_affine(
    input: Tensor, shape: Shape, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm: (output, mean, invvar)."""
    return _layer_norm(input, shape, weight, bias, eps, input.dtype)


def forward_affine_mixed_dtypes(
    input: Tensor, shape: Shape, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm in the dtype of `weight`: (output, mean, invvar)."""
    return _layer_norm(input, shape, weight, bias, eps, weight.dtype)


def rms_forward(input: Tensor, shape: Shape, eps: float) -> tuple[Tensor, Tensor]:
    """RMS norm without a weight: (output, invvar)."""
    return _rms_norm(input, shape, None, eps, input.dtype)


def rms_forward_affine(input: Tensor, shape: Shape, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMS norm: (output, invvar)."""
    return _rms_norm(input, shape, weight, eps, input.dtype)


def rms_forward_affine_mixed_dtypes(input: Tensor, shape: Shape, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMS norm in the dtype of `weight`: (output, invvar)."""
    return _rms_norm(input, shape, weight, eps, weight.dtype)


def backward(
    grad: Tensor, mean: Given, invvar: Tensor, kept: Tensor, shape: Shape, eps: float, memory_efficient: bool = False
) -> Tensor:
    """The gradient of `input` of `forward`; `kept` is that input, or the output."""
    return _gradients(grad, mean, invvar, kept, shape, None, None, memory_efficient, centred=True)[0]


def backward_affine(
    grad: Tensor, mean: Given, invvar: Tensor, kept: Tensor, shape: Shape, weight: Tensor, bias: Tensor, eps: float,
    memory_efficient: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `input`, `weight` and `bias` of `forward_affine`, of mixed dtypes or not."""
    return _gradients(grad, mean, invvar, kept, shape, weight, bias, memory_efficient, centred=True)


def rms_backward(
    grad: Tensor, invvar: Tensor, kept: Tensor, shape: Shape, eps: float, memory_efficient: bool = False
) -> Tensor:
    """The gradient of `input` of `rms_forward`."""
    return _gradients(grad, None, invvar, kept, shape, None, None, memory_efficient, centred=False)[0]


def rms_backward_affine(
    grad: Tensor, invvar: Tensor, kept: Tensor, shape: Shape, weight: Tensor, eps: float,
    memory_efficient: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of `input` and `weight` of `rms_forward_affine`, of mixed dtypes or not."""
    return _gradients(grad, None, invvar, kept, shape, weight, None, memory_efficient, centred=False)[:2]


def _rows(x: Tensor, shape: Shape) -> Tensor:
    return x.reshape(-1, prod(shape)).to(torch.promote_types(x.dtype, torch.float32))


def _layer_norm(
    x: Tensor, shape: Shape, weight: Given, bias: Given, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    mean = _rows(x, shape).mean(1)
    out, invvar = _rms_norm(_rows(x, shape) - mean[:, None], shape, weight, eps, mean.dtype)
    return (out if bias is None else out + _rows(bias, shape)).view(x.shape).to(dtype), mean, invvar


def _rms_norm(x: Tensor, shape: Shape, weight: Given, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows = _rows(x, shape)
    invvar = torch.rsqrt(rows.square().mean(1) + eps)
    out = rows * invvar[:, None]
    return (out if weight is None else out * _rows(weight, shape)).view(x.shape).to(dtype), invvar


def _gradients(
    grad: Tensor, mean: Given, invvar: Tensor, kept: Tensor, shape: Shape, weight: Given, bias: Given,
    from_output: bool, centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Those of the input, the weight and the bias; `centred`: of a layer norm."""
    normed, rows, column = _rows(kept, shape), _rows(grad, shape), invvar.view(-1, 1)
    if from_output:
        normed = normed if bias is None else normed - _rows(bias, shape)
        normed = normed if weight is None else normed / _rows(weight, shape)
    else:
        normed = (normed if mean is None else normed - mean.view(-1, 1)) * column
    scaled = rows if weight is None else rows * _rows(weight, shape)
    own = scaled - normed * (scaled * normed).mean(1, keepdim=True)
    own = (own - scaled.mean(1, keepdim=True) if centred else own) * column
    like = kept if weight is None else weight
    sums = ((rows * normed).sum(0), rows.sum(0))
    of_weight, of_bias = (each.view(tuple(shape)).to(like.dtype) for each in sums)
    return own.view(kept.shape).to(kept.dtype), of_weight, of_bias
