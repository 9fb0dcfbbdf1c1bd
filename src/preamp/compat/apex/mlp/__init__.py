"""A stack of linear layers with one activation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

__all__ = ["MLP", "MlpFunction", "mlp_function"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x, "relu": torch.relu, "sigmoid": torch.sigmoid,
}  # fmt: skip
_NAMES = [*_ACTIVATIONS]


def mlp_function(bias: int | bool, activation: int, input: Tensor, *weights_and_biases: Tensor) -> Tensor:
    """`input`, (batch, features), through layers: all weights, (out, in), then, with `bias`, all biases, (out,).

    `activation`, after each layer and after the last: 0 none, 1 ReLU, 2 sigmoid.
    """
    number = len(weights_and_biases) // 2 if bias else len(weights_and_biases)
    weights, biases = weights_and_biases[:number], weights_and_biases[number:] or (None,) * number
    for weight, offset in zip(weights, biases, strict=True):
        input = _ACTIVATIONS[_NAMES[activation]](F.linear(input, weight, offset))
    return input


class MlpFunction:
    """`mlp_function` as `.apply`."""

    apply = staticmethod(mlp_function)


class MLP(nn.Module):
    """Linear layers of `mlp_sizes`, input first, each followed by the activation, the last one too.

    `activation`: "relu", "sigmoid" or "none" (TypeError for others). Parameters are `weight_0`, `bias_0`, ..., in lists
    `weights` and `biases`; weights are normal with the variance 2 / (inputs + outputs), biases with 1 / outputs.
    """

    def __init__(self, mlp_sizes: Sequence[int], bias: bool = True, activation: str = "relu") -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise TypeError(f"activation={activation!r}: MLP has {', '.join(map(repr, _NAMES))}; write one of these")
        self.num_layers = len(mlp_sizes) - 1
        self.mlp_sizes = list(mlp_sizes)
        self.bias = 1 if bias else 0
        self.activation = _NAMES.index(activation)
        for i, (inputs, outputs) in enumerate(pairwise(mlp_sizes)):
            setattr(self, f"weight_{i}", Parameter(torch.empty(outputs, inputs)))
            if bias:
                setattr(self, f"bias_{i}", Parameter(torch.empty(outputs)))
        self.reset_parameters()

    @property
    def weights(self) -> list[Tensor]:
        """The weights, layer by layer."""
        return [getattr(self, f"weight_{i}") for i in range(self.num_layers)]

    @property
    def biases(self) -> list[Tensor]:
        """The biases, layer by layer; empty without."""
        return [getattr(self, f"bias_{i}") for i in range(self.num_layers)] if self.bias else []

    def reset_parameters(self) -> None:
        """Draw weights and biases."""
        for weight in self.weights:
            nn.init.normal_(weight, 0.0, math.sqrt(2.0 / sum(weight.shape)))
        for bias in self.biases:
            nn.init.normal_(bias, 0.0, math.sqrt(1.0 / len(bias)))

    def forward(self, input: Tensor) -> Tensor:
        """`input`, (batch, mlp_sizes[0]), through all layers."""
        return mlp_function(self.bias, self.activation, input, *self.weights, *self.biases)

    def extra_repr(self) -> str:
        """Sizes, bias, activation."""
        return f"MLP sizes: {self.mlp_sizes}, Bias={self.bias}, activation={_NAMES[self.activation]}"
