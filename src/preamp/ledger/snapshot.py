"""Checks before each step that the tensors it relies on have not changed.

User code may give a parameter or a state other memory, another dtype or memory order, remove a state or replace it, as
torch's optimizers allow. Nothing records that, so everything is compared before each step, in lists that C code walks:
about 0.2 microseconds a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

from torch import Tensor
from torch.nn import Parameter

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
