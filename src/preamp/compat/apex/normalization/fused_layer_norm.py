"""Apex's norm layers: modules over the functions of `_functions`, which are importable from here as in Apex."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ._functions import (
    FusedLayerNormAffineFunction,
    FusedLayerNormAffineMixedDtypesFunction,
    FusedLayerNormFunction,
    FusedRMSNormAffineFunction,
    FusedRMSNormAffineMixedDtypesFunction,
    FusedRMSNormFunction,
    Shape,
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
    manual_rms_norm,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
    shape_of,
)

__all__ = [
    "FusedLayerNorm", "FusedLayerNormAffineFunction", "FusedLayerNormAffineMixedDtypesFunction",
    "FusedLayerNormFunction", "FusedRMSNorm", "FusedRMSNormAffineFunction", "FusedRMSNormAffineMixedDtypesFunction",
    "FusedRMSNormFunction", "MixedFusedLayerNorm", "MixedFusedRMSNorm", "fused_layer_norm",
    "fused_layer_norm_affine", "fused_rms_norm", "fused_rms_norm_affine", "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine", "mixed_dtype_fused_rms_norm_affine",
]  # fmt: skip


class _FusedNorm(nn.Module):
    """What the layers share: shape, eps, a weight of ones, and a printed form."""

    normalized_shape: torch.Size
    eps: float
    elementwise_affine: bool
    memory_efficient: bool
    weight: Parameter | None

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        self.normalized_shape = shape_of(normalized_shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.memory_efficient = memory_efficient
        for name in self._names():
            made = Parameter(torch.empty(self.normalized_shape)) if elementwise_affine else None
            self.register_parameter(name, made)
        self.reset_parameters()

    def _names(self) -> tuple[str, ...]:
        return ("weight",)

    def reset_parameters(self) -> None:
        """Ones for the weight, zeros for the bias."""
        for name, param in self.named_parameters(recurse=False):
            (nn.init.ones_ if name == "weight" else nn.init.zeros_)(param)

    def extra_repr(self) -> str:
        """As torch prints its layer norm."""
        return f"{tuple(self.normalized_shape)}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class FusedLayerNorm(_FusedNorm):
    """Layer norm (Ba, Kiros and Hinton 2016) over the last dimensions; a drop-in for `torch.nn.LayerNorm`.

    The result has the input's dtype, whatever that of the parameters, or autocast's dtype where it is enabled.
    `memory_efficient` is kept as an attribute and else without effect: torch decides what to keep for the backward
    pass. `weight` and `bias` are None with `elementwise_affine=False`.
    """

    bias: Parameter | None
    _norm: Callable[..., Tensor] = staticmethod(fused_layer_norm_affine)

    def _names(self) -> tuple[str, ...]:
        return ("weight", "bias")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`, whose last dimensions are `normalized_shape`."""
        return self._norm(input, self.weight, self.bias, self.normalized_shape, self.eps, self.memory_efficient)


class FusedRMSNorm(_FusedNorm):
    """RMS norm (Zhang and Sennrich 2019) over the last dimensions; dtypes as in `FusedLayerNorm`, and no bias."""

    _norm: Callable[..., Tensor] = staticmethod(fused_rms_norm_affine)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`, whose last dimensions are `normalized_shape`."""
        return self._norm(input, self.weight, self.normalized_shape, self.eps, self.memory_efficient)


class MixedFusedLayerNorm(FusedLayerNorm):
    """`FusedLayerNorm` whose result has the dtype of its parameters, which may be another than the input's.

    `elementwise_affine` warns if given, and False is a RuntimeError: without parameters there is no dtype to go by.
    """

    _norm = staticmethod(mixed_dtype_fused_layer_norm_affine)

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: Any
    ) -> None:
        _take_affine(type(self).__name__, kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient, **kwargs)


class MixedFusedRMSNorm(FusedRMSNorm):
    """`FusedRMSNorm` whose result has the dtype of its weight; `elementwise_affine` as in `MixedFusedLayerNorm`."""

    _norm = staticmethod(mixed_dtype_fused_rms_norm_affine)

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: Any
    ) -> None:
        _take_affine(type(self).__name__, kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient, **kwargs)


def _take_affine(name: str, kwargs: dict[str, Any]) -> None:
    """Warn of an `elementwise_affine` argument, and refuse False."""
    if "elementwise_affine" not in kwargs:
        return
    warnings.warn(f"{name} does not support the `elementwise_affine` argument: leave it out", stacklevel=3)
    if not kwargs.pop("elementwise_affine"):
        raise RuntimeError(
            f"{name} does not support `elementwise_affine = False`: its result has the dtype of its parameters, and "
            f"there would be none. Use {name.removeprefix('Mixed')}"
        )
