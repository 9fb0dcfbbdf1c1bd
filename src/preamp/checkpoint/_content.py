"""What a checkpoint holds: plain containers of tensors, numbers and strings, and their copies."""

from __future__ import annotations

import copy
import os
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.serialization import get_safe_globals

from ..errors import CheckpointError, kind_of
from ..tree import PLAIN, map_tensors, tensors

_VALUES = {*PLAIN, bytes, bytearray, complex, set}
_LISTS = (list, tuple, torch.Size)
_DICTS = (dict, OrderedDict, Counter)

AnyPath = str | os.PathLike[str]
Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]
"""One, several, or several by name."""


def states_of(value: Any) -> Any:
    """The state_dict of an object, or {"several": their state_dicts by name} of a mapping of objects."""
    if isinstance(value, Mapping):
        return {"several": {name: item.state_dict() for name, item in value.items()}}
    state = value.state_dict()
    if several_in(state) is not None:
        raise CheckpointError(
            f"the state_dict of {kind_of(value)} has nothing but a dict called 'several', as a checkpoint has where it "
            "holds several objects, and could not be told from that: give the object by a name, {'name': object}"
        )
    return state


def several_in(state: Any) -> Mapping[Any, Any] | None:
    """The states by name, where a checkpoint holds several; None for the state of one object."""
    alone = isinstance(state, Mapping) and set(state) == {"several"}  # as the name of an entry, it has a tensor
    return state["several"] if alone and isinstance(state["several"], Mapping) else None


def kept_on_host(value: Any) -> Any:
    """A copy of `value` that nothing outside can change: tensors on the host, new containers.

    A tensor that occurs twice, as tied weights do, is copied once.
    """
    made: dict[Any, Tensor] = {}

    def to_host(tensor: Tensor) -> Tensor:
        key = place(tensor) or (id(tensor),)
        if key not in made:
            made[key] = tensor.detach().to("cpu", copy=True)
        return made[key]

    moved = map_tensors(to_host, value)
    return copy.deepcopy(moved, {id(tensor): tensor for tensor in tensors(moved)})


def place(tensor: Tensor) -> tuple[Any, ...] | None:
    """A key that is equal for two that are one tensor in memory; None for sharded, sparse or empty ones."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or not tensor.numel():
        return None
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def check_loadable(content: Mapping[str, Any]) -> None:
    """`CheckpointError` with the path of the first object that `load` would have to run code for."""
    for name, value in content.items():
        _check(value, name)
        check_extents(value, sys.maxsize, name)


_SHOWN = 2**28
"""Bytes that a view may show of memory that holds fewer."""


def check_extents(content: Any, size: int, where: Any) -> None:
    """`CheckpointError` for tensors that show far more than the memory they are views of, at most `size` bytes in all.

    An expanded tensor can repeat one number any number of times: copying the content of a file of a few bytes could
    take any amount of memory. So could a tensor that claims more than the file holds.
    """
    memory = {id(value): len(value) for value in _raw(content)}
    for tensor in tensors(content):
        for part in _parts(tensor):
            if part.device.type == "meta":
                continue
            storage = part.untyped_storage()
            memory[storage._cdata] = storage.nbytes()
            if part.nbytes > max(storage.nbytes(), _SHOWN):
                raise CheckpointError(
                    f"{where}: a tensor of shape {tuple(part.shape)} shows {part.nbytes} bytes of a memory of "
                    f"{storage.nbytes()}, and would fill as much as soon as it is copied. Save what it was expanded "
                    "from, or a copy of it, .contiguous()"
                )
    if sum(memory.values()) > size:
        raise CheckpointError(f"{where} states more than it holds: its tensors have {sum(memory.values())} bytes")


def _raw(content: Any) -> Iterator[bytes | bytearray]:
    """The bytes in nested containers, each once."""
    left, seen = [content], set()
    while left:
        value = left.pop()
        if isinstance(value, (bytes, bytearray)):
            yield value
        elif isinstance(value, (Mapping, *_LISTS, set)) and id(value) not in seen:
            seen.add(id(value))
            left += [*value.keys(), *value.values()] if isinstance(value, Mapping) else value


def _check(value: Any, where: str) -> None:
    kind = type(value)
    if isinstance(value, Tensor) or kind in _VALUES:
        return
    if kind in _LISTS:
        for index, item in enumerate(value):
            _check(item, f"{where}[{index}]")
    elif kind in _DICTS:
        for key, item in value.items():
            _check(key, f"a key of {where}")
            _check(item, f"{where}[{key!r}]")
        if attributes := getattr(value, "__dict__", None):  # versions of modules, which steer how a state is loaded
            _check(attributes, f"attributes of {where}")
    elif not any(kind is (each[0] if isinstance(each, tuple) else each) for each in get_safe_globals()):
        shown = kind_of(value) if kind is type else f"a {kind.__module__}.{kind.__qualname__}"
        raise CheckpointError(
            f"{where} is {shown}, which load() could only read by running code from "
            "the file, and refuses to: save tensors, numbers, strings, lists and dicts (float(...) of a NumPy number), "
            "or allow the class before saving and loading with torch.serialization.add_safe_globals"
        )


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The strided tensors that hold a tensor's values, those of this process."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if local.layout is torch.sparse_coo:
        return local._indices(), local._values()
    return (local,) if local.layout is torch.strided and not local.is_quantized else ()
