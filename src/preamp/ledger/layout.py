"""The tensors of a step, and checks before each step that they have not changed.

User code may give a parameter or a state other memory, another dtype or memory order, remove a state or replace it, as
torch's optimizers allow. Nothing records that, so everything is compared before each step, in lists that C code walks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..kernels import TensorList
from ..sharding import held_here, is_sharded

_DTYPE = attrgetter("dtype")


class Snapshot:
    """The addresses of some tensors, and the memory order of those that could have another one.

    `shown`: they are parameters, whose dtype and shape user code may change as well; then all of one dtype.
    """

    def __init__(self, tensors: Sequence[Tensor], *, shown: bool = False) -> None:
        self._addresses = list(map(Tensor.data_ptr, tensors))
        self._dtypes = set(map(_DTYPE, tensors)) if shown else None
        self._odd = [i for i, tensor in enumerate(tensors) if not tensor.is_contiguous()]
        self._strides = [tensors[i].stride() for i in self._odd]
        self._contiguous = [i for i, t in enumerate(tensors) if t.is_contiguous() and _may_be_reordered(t, shown)]

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether addresses and memory orders are what they were."""
        return (
            list(map(Tensor.data_ptr, tensors)) == self._addresses
            and (self._dtypes is None or set(map(_DTYPE, tensors)) == self._dtypes)
            and all(map(Tensor.is_contiguous, map(tensors.__getitem__, self._contiguous)))
            and list(map(Tensor.stride, map(tensors.__getitem__, self._odd))) == self._strides
        )


def _may_be_reordered(tensor: Tensor, reshaped: bool) -> bool:
    """Whether a tensor's entries may lie in another order: with the same shape, or also with another one."""
    sizes = [size for size in tensor.shape if size > 1]
    return len(sizes) > 1 and (reshaped or len(set(sizes)) < len(sizes))


class Entries:
    """The entries of `optimizer.state` that a step of some parameters uses. `owned`: parameters, and entry names."""

    def __init__(self, optimizer: Any, owned: Sequence[tuple[Sequence[Parameter], Sequence[str]]]) -> None:
        self._state = optimizer.state
        self._keys: list[Any] = [None]  # set at the first check: others may still be added now
        self._values: list[Any] = [None]
        self._rows = [(param, self._state[param]) for params, names in owned if names for param in params]
        self._names = [name for params, names in owned for name in names for _ in params]
        self._holders = [self._state[param] for params, names in owned for _ in names for param in params]
        self._entries = [row[name] for row, name in zip(self._holders, self._names, strict=True)]

    def hold(self, optimizer: Any) -> bool:
        """Whether each entry is still the same tensor."""
        state = self._state
        if optimizer.state is not state:
            return False
        if not (
            len(state) == len(self._keys)
            and all(map(is_, state, self._keys))
            and all(map(is_, state.values(), self._values))
        ):
            if any(state.get(param) is not row for param, row in self._rows):
                return False
            self._keys, self._values = list(state), list(state.values())
        try:
            return all(map(is_, map(dict.__getitem__, self._holders, self._names), self._entries))
        except KeyError:
            return False


_SHAPE = attrgetter("shape")


class Layout:
    """The memory layout of parameters that are stepped together, and of their states.

    They are stepped through private views of the same memory, whose shapes user code cannot change, so a step never
    writes beyond what was checked when these were made. `states`: for each name, one for each of `params`.
    """

    def __init__(self, params: Sequence[Parameter], states: Sequence[Sequence[Tensor]]) -> None:
        self.shapes = [param.shape for param in params]
        self._sharded = is_sharded(params[0])
        self._params = list[Tensor](params)
        # in the order of their creation, near each other in memory
        self._states = list(chain.from_iterable(zip(*states, strict=True)))
        here, kept = list(map(held_here, self._params)), list(map(held_here, self._states))
        self._shown, self._kept = Snapshot(here, shown=True), Snapshot(kept)
        with torch.no_grad():
            held = [tensor.detach() for tensor in (*here, *kept)]
        self.params = TensorList(held[: len(params)])
        self.states = [TensorList(held[len(params) + number :: len(states)]) for number in range(len(states))]
        if not self._sharded:
            self.params.owners = list(params)

    def holds(self) -> bool:
        """Whether parameters and states are where they were, in the same memory order."""
        params, states = self._params, self._states
        if self._sharded:
            params, states = list(map(held_here, params)), list(map(held_here, states))
        return self._shown.holds(params) and self._kept.holds(states)

    def takes(self, gradients: TensorList) -> bool:
        """Whether these are dense, on the device, and have the memory order or the shapes of the parameters."""
        if not gradients.together or gradients[0].device != self.params[0].device:
            return False
        if not self._sharded and self.params.contiguous and gradients.contiguous:
            return gradients.sizes == self.params.sizes
        return gradients.strided and list(map(_SHAPE, gradients)) == self.shapes


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
