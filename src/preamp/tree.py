"""Tensors inside nested inputs: the containers that models really receive.

Kept as they are: dict and other mappings, list, tuple, namedtuple, dataclass instances, `PackedSequence`, and the
ordered-dict outputs of model libraries. A container that holds nothing to change is returned as the same object.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

PLAIN = dict.fromkeys(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)  # looked up in compiled code, and dynamo of torch 2.8 cannot look into a frozenset
"""Types that hold nothing: most arguments of an operator are of these, and asking what else they are takes long."""

CASTABLE = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes between which tensors are cast: never from or to float64, nor integers."""


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `function` applied to every tensor in it.

    Containers are rebuilt in their own type only when something in them changed; strings, numbers, arrays and
    unknown objects pass through.
    """
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in PLAIN:
        return value
    if isinstance(value, PackedSequence):
        data = function(value.data)
        return value if data is value.data else value._replace(data=data)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(function, item) for item in value]
        if _same(items, value):
            return value
        if isinstance(value, tuple):
            return _refill_tuple(value, items)
        if type(value) is list:
            return items
        filled = copy.copy(value)  # of its type, and with its attributes
        list.__setitem__(filled, slice(None), items)
        return filled
    if isinstance(value, Mapping):
        changed = {key: map_tensors(function, item) for key, item in value.items()}
        if _same(changed.values(), value.values()):
            return value
        if type(value) is dict:
            return changed
        return _refill_mapping(value, changed)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
        mapped = {name: map_tensors(function, item) for name, item in fields.items()}
        if _same(mapped.values(), fields.values()):
            return value
        clone = copy.copy(value)
        for name, item in mapped.items():
            object.__setattr__(clone, name, item)  # frozen dataclasses too
        return clone
    return value


def _same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    """Whether all are the same objects. Not asked in compiled code, where containers cost nothing, and where dynamo of
    torch 2.11 cannot tell.
    """
    return not torch.compiler.is_compiling() and all(map(operator.is_, new, old))


def _refill_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A shallow copy of a mapping of any type with new items, so that subclasses keep their type and attributes."""
    if isinstance(original, MappingProxyType):
        return MappingProxyType(items)
    # Without a __copy__ of its own, a copy of what is not a dict itself shares the dict inside: writing would reach
    # the original.
    if isinstance(original, dict) or hasattr(original, "__copy__"):
        try:
            clone: Any = copy.copy(original)
            if clone is not original:
                for key, item in items.items():
                    clone[key] = item
                return clone
        except (TypeError, AttributeError, NotImplementedError, RuntimeError):
            pass  # immutable
    try:
        rebuilt: Any = type(original)(items)  # type: ignore[call-arg]
        if isinstance(rebuilt, Mapping) and rebuilt.keys() == items.keys():
            kept = all(rebuilt[key] is item for key, item in items.items())
            return rebuilt if kept else items
    except Exception:  # a constructor that takes something else
        pass
    return items  # the plain form of it is the best there is


def _refill_tuple(original: tuple[Any, ...], items: list[Any]) -> Any:
    """A tuple with new items, of the original's type and with its attributes."""
    kind: Any = type(original)
    if kind is tuple:
        return tuple(items)
    if hasattr(kind, "n_sequence_fields"):  # what torch.max(x, 0) and its like return
        return kind(items)
    clone = tuple.__new__(kind, items)  # whatever a constructor of its own takes
    if hasattr(original, "__dict__"):
        clone.__dict__.update(original.__dict__)
    return clone


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in `value`, depth first."""
    if isinstance(value, Tensor):
        return iter((value,))
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return iter(found)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its float16, bfloat16 and float32 tensors in `dtype`; integers, bools, float64 are left alone."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.dtype in CASTABLE else tensor

    return cast(value) if type(value) is Tensor else map_tensors(cast, value)
