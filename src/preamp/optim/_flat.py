"""Flat storage: many small parameters in one tensor, so that a step on a CPU is one call on long rows.

A step of a thousand small tensors is mostly calls, each of which wakes the threads. Laid side by side they are one.
States lie there for good; gradients are copied together at each step, and so are parameters, in and out, unless they
are laid there for good as well: then they are views of the one tensor, and the objects they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

SMALL = 16384
"""Entries up to which a tensor is laid beside others for good: beyond, copying its gradient costs more than a call."""
TINY = 2048
"""Entries up to which that pays even if the parameter is copied in and out."""


def fits(param: Parameter, flat: bool | None) -> bool:
    """Whether a parameter may lie beside others: small, float32, contiguous, on the CPU. `flat`: see `Flat`."""
    small = flat is not False and 0 < param.numel() <= (TINY if flat is None else SMALL)
    return small and param.dtype is torch.float32 and param.device.type == "cpu" and param.is_contiguous()


class Flat:
    """The one tensor of some parameters, and one for each of their states. `for_good`: parameters become views."""

    def __init__(
        self, params: Sequence[Parameter], states: Sequence[dict[str, Any]], names: Sequence[str], for_good: bool
    ) -> None:
        self._params, self._for_good = list(params), for_good
        self.param = _flattened([param.data for param in params])
        self._views = list(_views(self.param, params))
        for param, view in zip(params, self._views if for_good else (), strict=False):
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
        return not self._for_good or self._addresses == self._now()

    def take_in(self) -> None:
        """Copy the parameters in, if they lie elsewhere."""
        if not self._for_good:
            torch._foreach_copy_(self._views, list[Tensor](self._params))

    def give_out(self) -> None:
        """Copy the parameters back."""
        if not self._for_good:
            torch._foreach_copy_(list[Tensor](self._params), self._views)

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
