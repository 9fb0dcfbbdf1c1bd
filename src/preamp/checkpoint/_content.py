"""What a checkpoint holds: plain containers of tensors, numbers and strings, and their copies."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.serialization import get_safe_globals

from ..errors import CheckpointError, kind_of
from ..tree import PLAIN, map_tensors, tensors

_VALUES = {*PLAIN, bytes, bytearray, complex, set}
_LISTS = (list, tuple, torch.Size)
_DICTS = (dict, OrderedDict, Counter)


def kept_on_host(value: Any) -> Any:
    """A copy of `value` that nothing outside can change: tensors on the host, tied ones once, in new containers."""
    made: dict[Any, Tensor] = {}

    def to_host(tensor: Tensor) -> Tensor:
        whole = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.numel() > 0
        at = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if whole else id(tensor)
        if at not in made:
            made[at] = tensor.detach().to("cpu", copy=True)
        return made[at]

    moved = map_tensors(to_host, value)
    return copy.deepcopy(moved, {id(tensor): tensor for tensor in tensors(moved)})


def check_loadable(value: Any, where: str) -> None:
    """`CheckpointError` with the path of the first object that `load` would have to run code for."""
    kind = type(value)
    if isinstance(value, Tensor) or kind in _VALUES:
        return
    if kind in _LISTS:
        for index, item in enumerate(value):
            check_loadable(item, f"{where}[{index}]")
    elif kind in _DICTS:
        for key, item in value.items():
            check_loadable(key, f"a key of {where}")
            check_loadable(item, f"{where}[{key!r}]")
        if attributes := getattr(value, "__dict__", None):  # versions of modules, which steer how a state is loaded
            check_loadable(attributes, f"attributes of {where}")
    elif not any(kind is (each[0] if isinstance(each, tuple) else each) for each in get_safe_globals()):
        shown = kind_of(value) if kind is type else f"a {kind.__module__}.{kind.__qualname__}"
        raise CheckpointError(
            f"{where} is {shown}, which load() could only read by running code from "
            "the file, and refuses to: save tensors, numbers, strings, lists and dicts (float(...) of a NumPy number), "
            "or allow the class before saving and loading with torch.serialization.add_safe_globals"
        )
