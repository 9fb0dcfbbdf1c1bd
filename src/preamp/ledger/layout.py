"""Checks before each step that the tensors it relies on have not changed.

User code may give a parameter or a state other memory, another shape or dtype, remove a state or replace it, as torch's
optimizers allow. Nothing records that, so everything is compared before each step, in lists that C code walks.
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
"""Get an entry of a row without counting the access."""


def counting(state: Any, params: Sequence[Parameter]) -> State | None:
    """The state of an optimizer, if it counts changes to the rows of these parameters."""
    return state if isinstance(state, State) and all(state.watches(state.get(param)) for param in params) else None


class Entries:
    """The entries of `optimizer.state` that a step of some parameters uses. `owned`: parameters, and entry names."""

    def __init__(self, optimizer: Any, owned: Sequence[tuple[Sequence[Parameter], Sequence[str]]]) -> None:
        self._state = optimizer.state
        self._keys: list[Any] = [None]  # set at the first check: others may still be added now
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
        """Whether each entry is still the same tensor."""
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
    """The memory layout of parameters that are stepped separately, and of their states.

    They are stepped through private views of the same memory, whose shapes user code cannot change, so a step never
    writes beyond what was checked when these were made. `states`: for each name, one for each of `params`. `owner`: the
    optimizer's state, which holds these.
    """

    def __init__(self, params: Sequence[Parameter], states: Sequence[Sequence[Tensor]], owner: Any) -> None:
        self.shapes = [param.shape for param in params]
        self._sharded = is_sharded(params[0])
        self._originals = list[Tensor](params)
        # in the order of their creation, near each other in memory
        self._states = list(chain.from_iterable(zip(*states, strict=True)))
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
        """Whether parameters and states are where they were, with the same shapes."""
        params, states = self._originals, self._states
        if self._sharded:
            params, states = self._here(params), self._here(states)
        return (
            list(map(Tensor.data_ptr, params)) == self._addresses
            and list(map(Tensor.is_contiguous, self._spread)) == self._as_they_lay
            and self._shown.are_where_they_were(states)
        )

    def takes(self, gradients: TensorList) -> bool:
        """Whether these are dense, on the device, and have the memory order or the shapes of the parameters."""
        if not gradients.together or gradients[0].device != self.params[0].device:
            return False
        if self.dense and gradients.contiguous:
            return gradients.sizes == self.params.sizes
        return gradients.strided and list(map(_SHAPE, gradients)) == self.shapes


def spread(tensor: Tensor) -> bool:
    """Whether a tensor has entries in more than one dimension, so that its memory order may differ."""
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
