"""What a step relies on, and whether it is still so.

Whoever has a parameter or a state may give it other memory, another shape or dtype, take a state away or put another in
its place, as torch's optimizers allow. That leaves no trace but what is compared here: all of it before each step, so
in lists that C code walks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..kernels import TensorList
from ..sharding import held_here, is_sharded
from .leaves import Shown
from .state import State

_SHAPE = attrgetter("shape")
_entry = dict.__getitem__
"""Of a row, without its noticing."""


def counting(state: Any, params: Sequence[Parameter]) -> State | None:
    """The state of an optimizer, if it counts what is done to the rows of these parameters."""
    return state if isinstance(state, State) and all(state.watches(state.get(param)) for param in params) else None


class Entries:
    """The entries of `optimizer.state` that some parameters are stepped with. `owned`: parameters, and their names."""

    def __init__(self, optimizer: Any, owned: Sequence[tuple[Sequence[Parameter], Sequence[str]]]) -> None:
        self._state = optimizer.state
        self._keys: list[Any] = [None]  # as they are when first asked for: others may still be added now
        self._values: list[Any] = [None]
        self._rows = [(param, self._state[param]) for params, names in owned if names for param in params]
        together: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for params, names in owned:
            for name in names:
                together[name] += [self._state[param] for param in params]
        self._entries = [(name, rows, [_entry(row, name) for row in rows]) for name, rows in together.items()]
        self._changes = -1
        self._counted = isinstance(self._state, State) and all(self._state.watches(row) for _, row in self._rows)

    def hold(self, optimizer: Any) -> bool:
        """Whether each is the tensor that it was."""
        if optimizer.state is not self._state:
            return False
        if not self._counted:
            return self._are_same()
        if self._state.changes != self._changes:
            if not self._are_same():
                return False
            self._changes = self._state.changes
        return True

    def _are_same(self) -> bool:
        state = self._state
        if not (
            len(state) == len(self._keys)
            and all(map(is_, state, self._keys))
            and all(map(is_, state.values(), self._values))
        ):
            if any(state.get(param) is not row for param, row in self._rows):
                return False
            self._keys, self._values = list(state), list(state.values())
        try:
            return all(all(map(is_, map(_entry, rows, repeat(name)), values)) for name, rows, values in self._entries)
        except KeyError:
            return False


class Layout:
    """How parameters that are stepped each by itself, and their states, lie in memory.

    They are stepped through tensors of the same memory whose shapes nobody else can change, so that a step never writes
    beyond what was looked at when these were made. `states`: of each name, one for each of `params`. `owner`: the
    optimizer's state, which holds these.
    """

    def __init__(self, params: Sequence[Parameter], states: Sequence[Sequence[Tensor]], owner: Any) -> None:
        self.shapes = [param.shape for param in params]
        self._sharded = is_sharded(params[0])
        self._originals = list[Tensor](params)
        self._states = list(chain.from_iterable(zip(*states, strict=True)))  # as they were made, one near the other
        here, shown = self._here(self._originals), self._here(self._states)
        self._spread = list(filter(spread, here))
        self._as_they_lay = list(map(Tensor.is_contiguous, self._spread))
        self._addresses = list(map(Tensor.data_ptr, here))
        self._shown = Shown(shown, None if self._sharded else owner, others=2)
        with torch.no_grad():
            held = [tensor.detach() for tensor in (*here, *shown)]
        self.params = TensorList(held[: len(params)])
        self.states = [TensorList(held[len(params) + number :: len(states)]) for number in range(len(states))]
        if not self._sharded:
            self.params.owners = self._originals
        self.dense = not self._sharded and all(map(Tensor.is_contiguous, held))

    def _here(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(map(held_here, tensors)) if self._sharded else tensors

    def holds(self) -> bool:
        """Whether parameters and states lie as they did."""
        params, states = self._here(self._originals), self._here(self._states)
        return (
            list(map(Tensor.data_ptr, params)) == self._addresses
            and list(map(Tensor.is_contiguous, self._spread)) == self._as_they_lay
            and self._shown.are_where_they_were(states)
        )

    def takes(self, gradients: TensorList) -> bool:
        """Whether these are dense, on the device, and lie as the parameters do entry by entry, or have their shapes."""
        if not gradients.together or gradients[0].device != self.params[0].device:
            return False
        if self.dense and gradients.contiguous:
            return gradients.sizes == self.params.sizes
        return gradients.strided and list(map(_SHAPE, gradients)) == self.shapes


def spread(tensor: Tensor) -> bool:
    """Whether a tensor has entries in more than one dimension, so that they may lie in another order."""
    return sum(size > 1 for size in tensor.shape) > 1


def overlapping(params: Sequence[Parameter]) -> dict[Parameter, dict[Parameter, int]]:
    """For each parameter that shares memory with others: all of these and itself, numbered in their order."""
    spans = []
    for number, param in enumerate(params):
        here = held_here(param)
        if here.numel() and here.layout is torch.strided and here.data_ptr():
            last = sum((size - 1) * stride for size, stride in zip(here.shape, here.stride(), strict=True))
            begin = here.data_ptr()
            spans.append((here.device, begin, begin + (last + 1) * here.element_size(), number))
    spans.sort(key=lambda span: (str(span[0]), *span[1:]))
    shared: dict[Parameter, dict[Parameter, int]] = {}
    group: list[int] = []
    reach: tuple[Any, int] = (None, 0)
    for device, begin, end, number in [*spans, (None, 0, 0, -1)]:
        if device == reach[0] and begin < reach[1]:
            group.append(number)
            reach = (device, max(reach[1], end))
            continue
        if len(group) > 1:
            own = {params[place]: turn for turn, place in enumerate(sorted(group))}
            shared.update(dict.fromkeys(own, own))
        group, reach = [number], (device, end)
    return shared
