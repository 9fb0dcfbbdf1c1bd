"""Float32 sums of gradients, for low parameters whose own gradients have 16 bits.

Losses with scales of their own add up unscaled, where small gradients of low parameters would be lost between one
backward pass and the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter


@dataclass(slots=True)
class _Sum:
    value: Tensor
    shown: Tensor
    """The 16-bit gradient shown for it: the same, rounded."""
    version: int


class WideSums(dict[Parameter, _Sum]):
    """The sums, by parameter. One holds as long as the parameter's gradient is what was shown for it."""

    def of(self, parameter: Parameter) -> Tensor:
        """A parameter's gradient in float32, to be written; it must have one."""
        grad = parameter.grad
        assert grad is not None
        known = self.get(parameter)
        if known is None:
            return grad.to(torch.float32, copy=True)  # of a parameter that was cast since, it may be float32
        if known.shown is grad and known.version == grad._version:
            return known.value
        low = known.value.to(grad.dtype)  # user code wrote into it: entries that still show the sum keep the sum
        return torch.where((grad == low) & (low != 0), known.value, grad.float())

    def show(self, parameter: Parameter, total: Tensor) -> None:
        """Set a parameter's gradient to this float32 one, rounded, and keep the sum."""
        parameter.grad = shown = total.to(dtype_of_gradient(parameter), copy=True)
        self[parameter] = _Sum(total, shown, shown._version)

    def forget(self, parameter: Parameter) -> bool:
        """Drop a parameter's sum; returns whether there was one."""
        return self.pop(parameter, None) is not None


def dtype_of_gradient(parameter: Parameter) -> torch.dtype:
    """The dtype of a parameter's gradient; since torch 2.10 it may differ from the parameter's."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype
