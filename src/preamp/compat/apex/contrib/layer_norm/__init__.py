"""Layer norm over the last dimension, as a module and under the name that Megatron calls by `.apply`."""

from __future__ import annotations

from torch import Tensor

from ..._operator_function import operator_function
from ...normalization.fused_layer_norm import MixedFusedLayerNorm, mixed_dtype_fused_layer_norm_affine

__all__ = ["FastLayerNorm", "FastLayerNormFN"]


def _fast_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, memory_efficient: bool = False) -> Tensor:
    """Layer norm over the dimension of `weight`, whose dtype the result has; see `apex.normalization`."""
    return mixed_dtype_fused_layer_norm_affine(x, weight, bias, weight.shape, epsilon, memory_efficient)


FastLayerNormFN = operator_function("FastLayerNormFN", _fast_layer_norm)


class FastLayerNorm(MixedFusedLayerNorm):
    """Layer norm over a last dimension of any size; the result has the dtype of `weight`, or autocast's."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__(hidden_size, eps, memory_efficient=memory_efficient)
        self.epsilon = eps
