"""Flat storage: many small parameters in one tensor, so that a step on a CPU is one call on long rows.

A step of a thousand small tensors is mostly calls. Laid side by side they are one, for parameters and states alike;
gradients are copied together at each step. Parameters stay the objects they were, as views of the one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

SMALL = 16384
"""Entries up to which a tensor is laid beside others: beyond, the copy of its gradient costs more than the call."""


def fits(param: Parameter) -> bool:
    """Whether a parameter may lie beside others: small, float32, contiguous, on the CPU."""
    small = 0 < param.numel() <= SMALL and param.dtype is torch.float32
    return small and param.device.type == "cpu" and param.is_contiguous()


class Flat:
    """The one tensor of some parameters, and one for each of their states."""

    def __init__(self, params: Sequence[Parameter], states: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
        self._params = list(params)
        self.param = _flattened([param.data for param in params])
        for param, view in zip(params, _views(self.param, params), strict=True):
            param.data = view
        self.states: dict[str, list[Tensor]] = {}
        for name in names:
            together = _flattened([state[name] for state in states])
            for state, view in zip(states, _views(together, params), strict=True):
                state[name] = view
            self.states[name] = [together]
        self._gradient = torch.empty_like(self.param)
        self._gradient_views = list(_views(self._gradient, params))
        self._addresses = self._now()

    def holds(self) -> bool:
        """Whether every parameter still lies where it was put: `model.to()` and the like move them."""
        return self._addresses == self._now()

    def _now(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._params))

    def gathered(self, gradients: list[Tensor]) -> Tensor:
        """Gradients in one tensor, in the order of the parameters: always the same one, written anew."""
        torch._foreach_copy_(self._gradient_views, gradients)
        return self._gradient


def _flattened(values: Sequence[Tensor]) -> Tensor:
    together: Tensor = torch._C._nn.flatten_dense_tensors(list(values))
    return together


def _views(together: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    views: Sequence[Tensor] = torch._C._nn.unflatten_dense_tensors(together, list(like))
    return views
