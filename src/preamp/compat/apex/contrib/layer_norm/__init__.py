"""Layer norm over the last dimension, as a module and under the name that Megatron calls by `.apply`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..._operator_function import OperatorFunction
from ...normalization.fused_layer_norm import mixed_dtype_fused_layer_norm_affine

__all__ = ["FastLayerNorm", "FastLayerNormFN"]


def _fast_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, memory_efficient: bool = False) -> Tensor:
    """Layer norm over the dimension of `weight`, whose dtype the result has; see `apex.normalization`."""
    return mixed_dtype_fused_layer_norm_affine(x, weight, bias, weight.shape, epsilon, memory_efficient)


class FastLayerNormFN(OperatorFunction, function=_fast_layer_norm, tensors=3):
    """Layer norm over the last dimension: `FastLayerNormFN.apply(x, gamma, beta, epsilon)`."""


class FastLayerNorm(nn.Module):
    """Layer norm over a last dimension of any size; the result has the dtype of `weight`, or autocast's."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__()
        self.epsilon = eps
        self.memory_efficient = memory_efficient
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones for the weight, zeros for the bias."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` over its last dimension."""
        return _fast_layer_norm(x, self.weight, self.bias, self.epsilon, self.memory_efficient)
