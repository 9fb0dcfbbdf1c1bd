"""The norms under the names of Apex's autograd functions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._by_hand import ByHand, kept
from ._functions import (
    Shape,
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
)


class FusedLayerNormFunction(ByHand):
    """`fused_layer_norm`."""

    apply = staticmethod(fused_layer_norm)

    @staticmethod
    def forward(ctx: Any, input: Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False) -> Tensor:
        """The norm; `ctx` as in a torch.autograd.Function."""
        return kept(ctx, fused_layer_norm, (input,), normalized_shape, eps, memory_efficient)


class FusedLayerNormAffineFunction(ByHand):
    """`fused_layer_norm_affine`."""

    apply = staticmethod(fused_layer_norm_affine)

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, normalized_shape: Shape, eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:  # fmt: skip
        """The norm; `ctx` as in a torch.autograd.Function."""
        return kept(ctx, fused_layer_norm_affine, (input, weight, bias), normalized_shape, eps, memory_efficient)


class FusedLayerNormAffineMixedDtypesFunction(ByHand):
    """`mixed_dtype_fused_layer_norm_affine`."""

    apply = staticmethod(mixed_dtype_fused_layer_norm_affine)

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, normalized_shape: Shape, eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:  # fmt: skip
        """The norm; `ctx` as in a torch.autograd.Function."""
        return kept(
            ctx, mixed_dtype_fused_layer_norm_affine, (input, weight, bias), normalized_shape, eps, memory_efficient
        )


class FusedRMSNormFunction(ByHand):
    """`fused_rms_norm`."""

    apply = staticmethod(fused_rms_norm)

    @staticmethod
    def forward(ctx: Any, input: Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False) -> Tensor:
        """The norm; `ctx` as in a torch.autograd.Function."""
        return kept(ctx, fused_rms_norm, (input,), normalized_shape, eps, memory_efficient)


class FusedRMSNormAffineFunction(ByHand):
    """`fused_rms_norm_affine`."""

    apply = staticmethod(fused_rms_norm_affine)

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:  # fmt: skip
        """The norm; `ctx` as in a torch.autograd.Function."""
        return kept(ctx, fused_rms_norm_affine, (input, weight), normalized_shape, eps, memory_efficient)


class FusedRMSNormAffineMixedDtypesFunction(ByHand):
    """`mixed_dtype_fused_rms_norm_affine`."""

    apply = staticmethod(mixed_dtype_fused_rms_norm_affine)

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:  # fmt: skip
        """The norm; `ctx` as in a torch.autograd.Function."""
        return kept(ctx, mixed_dtype_fused_rms_norm_affine, (input, weight), normalized_shape, eps, memory_efficient)
