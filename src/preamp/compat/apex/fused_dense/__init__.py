"""Linear layers, with GELU between two, on torch's own kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

__all__ = ["FusedDense", "FusedDenseGeluDense", "fused_dense_function"]


def fused_dense_function(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`input @ weight.T + bias`."""
    return F.linear(input, weight, bias)


class FusedDense(nn.Linear):
    """`torch.nn.Linear`."""


class FusedDenseGeluDense(nn.Module):
    """Two linear layers with GELU (tanh) between them; parameters are weight1, bias1, weight2 and bias2.

    They are drawn as torch.nn.Linear's are. AssertionError for `bias=False`.
    """

    def __init__(self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        assert bias, "FusedDenseGeluDense module without bias is currently not supported: write two FusedDense layers"
        self.in_features = in_features
        self.intermediate_features = intermediate_features
        self.out_features = out_features
        self.weight1 = Parameter(torch.empty(intermediate_features, in_features))
        self.bias1 = Parameter(torch.empty(intermediate_features))
        self.weight2 = Parameter(torch.empty(out_features, intermediate_features))
        self.bias2 = Parameter(torch.empty(out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters."""
        for weight, bias in ((self.weight1, self.bias1), (self.weight2, self.bias2)):
            bound = weight.shape[1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)

    def forward(self, input: Tensor) -> Tensor:
        """`input`, (..., in_features), through both layers."""
        inner = F.gelu(F.linear(input, self.weight1, self.bias1), approximate="tanh")
        return F.linear(inner, self.weight2, self.bias2)
