"""Layer norm and RMS norm as functions, with Apex's rules of which dtype comes out.

Under autocast everything is cast to autocast's dtype and so is the result, as Apex does and torch does not (whose
layer_norm runs in float32 there). Without autocast the result has the dtype of the input, or in the `mixed_dtype`
functions that of the parameters. Statistics are computed in float32 for 16-bit inputs (float64 for float64).

torch's operators are called below `torch.nn.functional`, so that Apex's O1, which casts by patching names there, lets
these alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....formats import LOW_DTYPES
from .._operator_function import OperatorFunction

Shape = int | Sequence[int]


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer norm (Ba, Kiros and Hinton 2016) over the last dimensions, times `weight`, plus `bias`.

    `input`: any floating dtype, its last dimensions are `normalized_shape`; `weight`, `bias`: of that shape, or None.
    Returns the shape and dtype of `input`, or autocast's dtype. `memory_efficient` is accepted: torch decides what to
    keep. RuntimeError if shapes do not fit.
    """
    return _layer_norm(input, weight, bias, normalized_shape, eps, mixed=False)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Layer norm without parameters; see `fused_layer_norm_affine`."""
    return fused_layer_norm_affine(input, None, None, normalized_shape, eps, memory_efficient)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer norm whose result has the dtype of `weight`, which may be another than that of `input`."""
    return _layer_norm(input, weight, bias, normalized_shape, eps, mixed=True)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """RMS norm (Zhang and Sennrich 2019) over the last dimensions, times `weight`; see `fused_layer_norm_affine`."""
    return _rms_norm(input, weight, normalized_shape, eps, mixed=False)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """RMS norm without parameters; see `fused_layer_norm_affine`."""
    return fused_rms_norm_affine(input, None, normalized_shape, eps, memory_efficient)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """RMS norm whose result has the dtype of `weight`, which may be another than that of `input`."""
    return _rms_norm(input, weight, normalized_shape, eps, mixed=True)


# -- under the names of Apex's autograd functions


class FusedLayerNormFunction(OperatorFunction, function=fused_layer_norm, tensors=1):
    """`fused_layer_norm`."""


class FusedLayerNormAffineFunction(OperatorFunction, function=fused_layer_norm_affine, tensors=3):
    """`fused_layer_norm_affine`."""


class FusedLayerNormAffineMixedDtypesFunction(
    OperatorFunction, function=mixed_dtype_fused_layer_norm_affine, tensors=3
):
    """`mixed_dtype_fused_layer_norm_affine`."""


class FusedRMSNormFunction(OperatorFunction, function=fused_rms_norm, tensors=1):
    """`fused_rms_norm`."""


class FusedRMSNormAffineFunction(OperatorFunction, function=fused_rms_norm_affine, tensors=2):
    """`fused_rms_norm_affine`."""


class FusedRMSNormAffineMixedDtypesFunction(OperatorFunction, function=mixed_dtype_fused_rms_norm_affine, tensors=2):
    """`mixed_dtype_fused_rms_norm_affine`."""


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm written out: x / sqrt(mean(x^2) + eps), the mean in float32 over the last dimensions, times `weight`.

    Without `weight` the result is at least float32; with a 16-bit one it has that dtype.
    """
    dims = tuple(range(-len(shape_of(normalized_shape)), 0))
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    normed = input * torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + eps)
    if weight is None:
        return normed
    return weight * (normed.to(weight.dtype) if weight.dtype in LOW_DTYPES else normed)


def shape_of(normalized_shape: Shape) -> torch.Size:
    """The last dimensions as a torch.Size; a number stands for one of them."""
    if isinstance(normalized_shape, torch.Size):
        return normalized_shape
    return torch.Size((normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape)


def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]  # which not every release traces


def _autocast_dtype(input: Tensor) -> torch.dtype | None:
    """The dtype of autocast where it is enabled."""
    kind = input.device.type
    if not _has_autocast(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _layer_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, normalized_shape: Shape, eps: float, mixed: bool
) -> Tensor:
    low = _autocast_dtype(input)
    if low is not None:
        input, weight, bias = input.to(low), _to(weight, low), _to(bias, low)
        with torch.autocast(input.device.type, enabled=False):  # which would have its own rule for this
            return torch.layer_norm(input, shape_of(normalized_shape), weight, bias, eps)
    dtype = _common(input, weight, bias)
    normed = torch.layer_norm(input.to(dtype), shape_of(normalized_shape), _to(weight, dtype), _to(bias, dtype), eps)
    return normed.to(weight.dtype if mixed and weight is not None else input.dtype)


def _rms_norm(input: Tensor, weight: Tensor | None, normalized_shape: Shape, eps: float, mixed: bool) -> Tensor:
    low = _autocast_dtype(input)
    if low is not None:
        input, weight = input.to(low), _to(weight, low)
        with torch.autocast(input.device.type, enabled=False):
            return torch.rms_norm(input, shape_of(normalized_shape), weight, eps)
    dtype = _common(input, weight)
    normed = torch.rms_norm(input.to(dtype), shape_of(normalized_shape), _to(weight, dtype), eps)
    return normed.to(weight.dtype if mixed and weight is not None else input.dtype)


def _common(input: Tensor, *params: Tensor | None) -> torch.dtype:
    """The dtype of all, if they agree (torch's kernels widen inside); else float32, or float64 if one is."""
    dtypes = {input.dtype, *(param.dtype for param in params if param is not None)}
    if len(dtypes) == 1:
        return input.dtype
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
