"""What torch has operators for, under Apex's names: mlp, fused_dense, and the layers, loss and clipping of contrib."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_

from ...kernels import global_norm
from .normalization.fused_layer_norm import MixedFusedLayerNorm, mixed_dtype_fused_layer_norm_affine, operator_function

__all__ = [
    "MLP", "FastLayerNorm", "FastLayerNormFN", "FusedDense", "FusedDenseGeluDense", "SoftmaxCrossEntropyLoss",
    "clip_grad_norm_", "fused_dense_function", "mlp_function",
]  # fmt: skip

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
        first, second = nn.Linear(in_features, intermediate_features), nn.Linear(intermediate_features, out_features)
        self.weight1, self.bias1 = first.weight, first.bias
        self.weight2, self.bias2 = second.weight, second.bias

    def forward(self, input: Tensor) -> Tensor:
        """`input`, (..., in_features), through both layers."""
        inner = F.gelu(F.linear(input, self.weight1, self.bias1), approximate="tanh")
        return F.linear(inner, self.weight2, self.bias2)


# -- contrib


class FastLayerNorm(MixedFusedLayerNorm):
    """Layer norm over a last dimension of any size; the result has the dtype of `weight`, or autocast's."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__(hidden_size, eps, memory_efficient=memory_efficient)
        self.epsilon = eps


def _fast_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, memory_efficient: bool = False) -> Tensor:
    """Layer norm over the dimension of `weight`, whose dtype the result has; see `apex.normalization`."""
    return mixed_dtype_fused_layer_norm_affine(x, weight, bias, weight.shape, epsilon, memory_efficient)


def _losses(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, padding_idx: int = 0, half_to_float: bool = False
) -> Tensor:
    """The cross entropy of each row, of shape (N,), for `logits` (N, C) of any floating dtype and `labels` (N,).

    Computed in float32 (float64 for float64); the result has the dtype of `logits`, or float32 with `half_to_float`.
    `smoothing`: the share of the target that is spread over all classes. Rows whose label is `padding_idx` lose 0:
    by default those of class 0, as in Apex; write a number that is no class where there is no padding.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(wide, labels.long(), reduction="none", ignore_index=padding_idx, label_smoothing=smoothing)
    return losses if half_to_float else losses.to(logits.dtype)


FastLayerNormFN = operator_function("FastLayerNormFN", _fast_layer_norm)
SoftmaxCrossEntropyLoss = operator_function("SoftmaxCrossEntropyLoss", _losses)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """As torch.nn.utils.clip_grad_norm_, and the norm of 16-bit gradients is computed in float32, where torch's
    overflows from 65504 on. Returns the norm before clipping, 0-d float32.

    `norm_type`: a positive number, or inf. RuntimeError for a norm that is not finite, with `error_if_nonfinite`.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm = global_norm([each.grad.detach() for each in given if each.grad is not None], float(norm_type))
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(f"the norm of the gradients is non-finite, {norm.item()}: they cannot be clipped by it")
    clip_grads_with_norm_(given, max_norm, norm)
    return norm
