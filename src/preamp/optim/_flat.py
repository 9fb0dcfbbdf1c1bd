"""Flat storage: many small parameters in one tensor, so that a step on a CPU is one call on long rows.

A step of a thousand small tensors is mostly calls, each of which wakes the threads. Laid side by side they are one.
States lie there for good; gradients are copied together at each step, and so are parameters, in and out, unless they
are laid there for good as well: then they are views of the one tensor, and the objects they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..sharding import is_sharded

SMALL = 16384
"""Entries up to which a tensor is laid beside others for good: beyond, copying its gradient costs more than a call."""
TINY = 2048
"""Entries up to which that pays even if the parameter is copied in and out."""

PIECE = 2**18
"""Entries that are copied in, stepped and copied out at a time."""


def fits(param: Parameter, flat: bool | None) -> bool:
    """Whether a parameter may lie beside others: small, float32, contiguous, on the CPU. `flat`: see `Flat`."""
    small = flat is not False and 0 < param.numel() <= (TINY if flat is None else SMALL) and param.dim() > 0
    plain = param.dtype is torch.float32 and param.device.type == "cpu" and not is_sharded(param)
    return small and plain and param.is_contiguous()


def row(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor's rows. Tensors with like rows can be laid one behind the other by one call."""
    return tuple(tensor.shape[1:])


class Flat:
    """The one tensor of some parameters, and one for each of their states. `for_good`: parameters become views.

    `params`: those with like rows (`row`) side by side, for speed. `scratch`: where parameters are copied to, for
    several of these in turn.
    """

    def __init__(
        self, params: Sequence[Parameter], states: Sequence[dict[str, Any]], names: Sequence[str], for_good: bool,
        scratch: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._params, self._for_good = list(params), for_good
        entries = sum(param.numel() for param in params)
        if for_good:
            self.param = _flattened([param.data for param in params])
        else:
            self.param = (params[0].detach().new_empty(entries) if scratch is None else scratch)[:entries]
        self._views = list(_views(self.param, params))
        for param, view in zip(params, self._views if for_good else (), strict=False):
            param.data = view
        self.states: dict[str, list[Tensor]] = {}
        self._parts: dict[int, list[Tensor]] = {}
        for name in names:
            together = _flattened([state[name] for state in states])
            self._parts[id(together)] = list(_views(together, params))
            for state, view in zip(states, self._parts[id(together)], strict=True):
                state[name] = view
            self.states[name] = [together]
        self._gradient = torch.empty_like(self.param)
        self._parts[id(self._gradient)] = list(_views(self._gradient, params))
        self._runs = list(_runs(params))
        self._param_rows, self._gradient_rows = self._by_rows(self.param), self._by_rows(self._gradient)
        self._addresses = self._now()

    def holds(self) -> bool:
        """Whether every parameter still lies where it was put: `model.to()` and the like move them."""
        return not self._for_good or self._addresses == self._now()

    def take_in(self) -> None:
        """Copy the parameters in, if they lie elsewhere."""
        if not self._for_good:
            self._lay(self._params, self._param_rows)

    def give_out(self) -> None:
        """Copy the parameters back."""
        if not self._for_good:
            torch._foreach_copy_(list[Tensor](self._params), self._views)

    def add(self, update: Tensor, factor: float) -> None:
        """Add `factor * update` to the parameters where they lie. `update`: a state of this, or the gradient."""
        if self._for_good:
            self.param.add_(update, alpha=factor)
        else:
            torch._foreach_add_(list[Tensor](self._params), self._parts[id(update)], alpha=factor)

    def _now(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._params))

    def gathered(self, gradients: list[Tensor]) -> Tensor:
        """Gradients in one tensor, in the order of the parameters: always the same one, written anew."""
        self._lay(gradients, self._gradient_rows)
        return self._gradient

    def _by_rows(self, together: Tensor) -> list[Tensor]:
        """The part of each run in `together`, with the run's rows."""
        sizes = [sum(p.numel() for p in self._params[begin:end]) for begin, end in self._runs]
        parts = together.split(sizes)
        return [part.view(-1, *row(self._params[begin])) for part, (begin, _) in zip(parts, self._runs, strict=True)]

    def _lay(self, tensors: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """Copy tensors one behind the other: concatenating takes half the time of as many copies."""
        with torch.no_grad():
            for (begin, end), part in zip(self._runs, rows, strict=True):
                torch.cat(tensors[begin:end], out=part)  # type: ignore[arg-type]


def _runs(params: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Where stretches of parameters with like rows begin and end."""
    runs, begin = [], 0
    for _, run in groupby(params, row):
        end = begin + len(list(run))
        runs.append((begin, end))
        begin = end
    return runs


def _flattened(values: Sequence[Tensor]) -> Tensor:
    together: Tensor = torch._C._nn.flatten_dense_tensors(list(values))
    return together


def _views(together: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    views: Sequence[Tensor] = torch._C._nn.unflatten_dense_tensors(together, list(like))
    return views
