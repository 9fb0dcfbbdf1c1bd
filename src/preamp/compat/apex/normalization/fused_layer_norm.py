"""Apex's norm layers and their functions, with Apex's rules of which dtype comes out.

Under autocast everything but float64 inputs is cast to autocast's dtype and so is the result, as Apex does and torch
does not (whose layer_norm runs in float32 there). Without autocast the result has the dtype of the input, or in the
`mixed_dtype` functions that of the parameters. Statistics are computed in float32 for 16-bit inputs (float64 for
float64).

torch's operators are called below `torch.nn.functional`, so that Apex's O1, which casts by patching names there, lets
these alone.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "FusedLayerNorm", "FusedLayerNormAffineFunction", "FusedLayerNormAffineMixedDtypesFunction",
    "FusedLayerNormFunction", "FusedRMSNorm", "FusedRMSNormAffineFunction", "FusedRMSNormAffineMixedDtypesFunction",
    "FusedRMSNormFunction", "MixedFusedLayerNorm", "MixedFusedRMSNorm", "fused_layer_norm",
    "fused_layer_norm_affine", "fused_rms_norm", "fused_rms_norm_affine",
    "mixed_dtype_fused_layer_norm_affine", "mixed_dtype_fused_rms_norm_affine",
]  # fmt: skip

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
    return _normed(torch.layer_norm, input, (weight, bias), normalized_shape, eps, mixed=False)


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
    return _normed(torch.layer_norm, input, (weight, bias), normalized_shape, eps, mixed=True)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor | None, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMS norm (Zhang and Sennrich 2019) over the last dimensions, times `weight`; see `fused_layer_norm_affine`."""
    return _normed(torch.rms_norm, input, (weight,), normalized_shape, eps, mixed=False)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """RMS norm without parameters; see `fused_layer_norm_affine`."""
    return fused_rms_norm_affine(input, None, normalized_shape, eps, memory_efficient)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMS norm whose result has the dtype of `weight`, which may be another than that of `input`."""
    return _normed(torch.rms_norm, input, (weight,), normalized_shape, eps, mixed=True)


# -- under the names of Apex's autograd functions


def operator_function(name: str, function: Callable[..., Tensor]) -> type:
    """A class whose `apply` is the function itself, so that autocast, torch.compile and second derivatives work.

    `forward` is there for those who look at its arguments, as Megatron does.
    """

    def forward(ctx: Any, *arguments: Any, **options: Any) -> Tensor:
        """What `apply` returns; `ctx` is not used."""
        return function(*arguments, **options)

    signature = inspect.signature(function)
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    told = signature.replace(parameters=[context, *signature.parameters.values()])
    forward.__signature__ = told  # type: ignore[attr-defined]
    return type(name, (), {"apply": staticmethod(function), "forward": staticmethod(forward)})


FusedLayerNormFunction = operator_function("FusedLayerNormFunction", fused_layer_norm)
FusedLayerNormAffineFunction = operator_function("FusedLayerNormAffineFunction", fused_layer_norm_affine)
FusedLayerNormAffineMixedDtypesFunction = operator_function(
    "FusedLayerNormAffineMixedDtypesFunction", mixed_dtype_fused_layer_norm_affine
)
FusedRMSNormFunction = operator_function("FusedRMSNormFunction", fused_rms_norm)
FusedRMSNormAffineFunction = operator_function("FusedRMSNormAffineFunction", fused_rms_norm_affine)
FusedRMSNormAffineMixedDtypesFunction = operator_function(
    "FusedRMSNormAffineMixedDtypesFunction", mixed_dtype_fused_rms_norm_affine
)


def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]  # which not every release traces


def _normed(
    operator: Callable[..., Tensor], input: Tensor, params: Sequence[Tensor | None], shape: Shape, eps: float,
    mixed: bool,
) -> Tensor:  # fmt: skip
    """`torch.layer_norm` or `torch.rms_norm`; `params`: the weight, and the bias if the operator takes one."""
    kind, shape = input.device.type, (shape,) if isinstance(shape, int) else tuple(shape)
    if input.dtype is not torch.float64 and _has_autocast(kind) and torch.is_autocast_enabled(kind):
        low = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):  # which would have its own rule for this
            return operator(input.to(low), shape, *_all_to(params, low), eps)
    dtypes = {input.dtype, *(param.dtype for param in params if param is not None)}
    dtype = input.dtype  # torch's kernels widen inside, if all have one dtype
    if len(dtypes) > 1:
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    weight = params[0]
    normed = operator(input.to(dtype), shape, *_all_to(params, dtype), eps)
    return normed.to(weight.dtype if mixed and weight is not None else input.dtype)


def _all_to(params: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    return [None if param is None else param.to(dtype) for param in params]


# -- layers


class _Fused:
    """The constructor of both kinds of layers."""

    memory_efficient = False  # of layers that Apex pickled before it had this

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)  # type: ignore[call-arg]
        self.memory_efficient = memory_efficient


class FusedLayerNorm(_Fused, nn.LayerNorm):
    """`torch.nn.LayerNorm` (Ba, Kiros and Hinton 2016) with Apex's arguments and dtypes.

    The result has the input's dtype, whatever that of the parameters, or autocast's dtype where it is enabled.
    `memory_efficient` is kept as an attribute and else without effect: torch decides what to keep for the backward
    pass. `weight` and `bias` are None with `elementwise_affine=False`.
    """

    _norm: Callable[..., Tensor] = staticmethod(fused_layer_norm_affine)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`, whose last dimensions are `normalized_shape`."""
        return self._norm(input, self.weight, self.bias, self.normalized_shape, self.eps, self.memory_efficient)


class FusedRMSNorm(_Fused, nn.RMSNorm):
    """`torch.nn.RMSNorm` (Zhang and Sennrich 2019); arguments and dtypes as in `FusedLayerNorm`, and no bias."""

    eps: float
    _norm: Callable[..., Tensor] = staticmethod(fused_rms_norm_affine)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`, whose last dimensions are `normalized_shape`."""
        return self._norm(input, self.weight, self.normalized_shape, self.eps, self.memory_efficient)


class _Mixed:
    """The constructor of the layers whose result has the dtype of their parameters."""

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: Any
    ) -> None:
        name = type(self).__name__
        if "elementwise_affine" in kwargs:
            warnings.warn(f"{name} does not support the `elementwise_affine` argument: leave it out", stacklevel=2)
            if not kwargs.pop("elementwise_affine"):
                raise RuntimeError(
                    f"{name} does not support `elementwise_affine = False`: its result has the dtype of its "
                    f"parameters, and there would be none. Use {name.removeprefix('Mixed')}"
                )
        super().__init__(normalized_shape, eps, True, memory_efficient, **kwargs)  # type: ignore[call-arg]


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """`FusedLayerNorm` whose result has the dtype of its parameters, which may be another than the input's.

    `elementwise_affine` warns if given, and False is a RuntimeError: without parameters there is no dtype to go by.
    """

    _norm = staticmethod(mixed_dtype_fused_layer_norm_affine)


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """`FusedRMSNorm` whose result has the dtype of its weight; `elementwise_affine` as in `MixedFusedLayerNorm`."""

    _norm = staticmethod(mixed_dtype_fused_rms_norm_affine)
