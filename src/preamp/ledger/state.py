"""`optimizer.state`, which counts changes of its entries and reads of them.

Comparing every entry before each step takes a tenth of a step of many small tensors, because the memory that holds them
is no longer in the cache. So these dicts, which are dicts to all other code, count their changes and reads. Copied or
pickled they are plain dicts.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_CHANGING = ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update")
_ASKING = ("__getitem__", "get", "items", "values", "copy", "__or__", "__ror__", "__iter__")
"""The last is not asked for a value: a dict that has one of its own is copied by `dict(...)` through the others."""


class Row(dict[str, Any]):
    """The states of one parameter, by name. `state`: the `State` that counts changes, if any."""

    __slots__ = ("state",)

    def __init__(self, *args: Any, state: State | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.state = state

    def _changes(self) -> None:
        if self.state is not None:
            self.state.changes += 1
            self.state.asked += 1  # user code may keep what is removed

    def _asks(self) -> None:
        if self.state is not None:
            self.state.asked += 1

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> tuple[Any, ...]:  # `torch.load(weights_only=True)` takes these
        return OrderedDict, (), None, None, iter(self.items())


class State(defaultdict[Any, Any]):
    """The rows of an optimizer's parameters, made when first accessed."""

    changes: int
    """Incremented whenever an entry, here or in a row, may have been replaced."""
    asked: int
    """Incremented whenever user code may have got a reference to an entry of a row."""

    def __init__(self, items: Mapping[Any, Any]) -> None:
        self.changes = self.asked = 0
        super().__init__(dict)
        for key, row in items.items():
            self[key] = Row(row, state=self) if type(row) in (dict, OrderedDict, Row) else row

    def _changes(self) -> None:
        self.changes += 1

    def __missing__(self, key: Any) -> Any:
        row = self[key] = Row(state=self)
        return row

    def watches(self, row: Any) -> bool:
        """Whether changes of a row are counted here."""
        return type(row) is Row and row.state is self

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,), None, None, iter(self.items())


def _counting(kind: Any, name: str, count: Callable[[Any], None]) -> None:
    plain = getattr(kind, name)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        count(self)
        return plain(self, *args, **kwargs)

    counted.__name__ = name
    setattr(kind, name, counted)


for _kind in (Row, State):
    for _name in _CHANGING:
        _counting(_kind, _name, _kind._changes)
for _name in _ASKING:
    _counting(Row, _name, Row._asks)


def state_like_parameters(optimizer: Optimizer) -> None:
    """Cast an optimizer's states of its parameters' shapes to their present dtype."""
    inner = getattr(optimizer, "optim", None)  # by which a ZeroRedundancyOptimizer steps its part
    if isinstance(inner, Optimizer):
        state_like_parameters(inner)
    castable = (torch.float16, torch.bfloat16, torch.float32)
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            fits = isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype in castable
            if fits and parameter.dtype in castable and value.dtype is not parameter.dtype:
                state[key] = value.to(parameter.dtype)
