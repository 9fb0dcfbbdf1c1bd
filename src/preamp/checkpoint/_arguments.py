"""The arguments of all that saves and loads, checked before anything is read, written or changed, and copied."""

from __future__ import annotations

import copy
import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.serialization import get_safe_globals

from ..errors import CheckpointError, kind_of
from ..session import Session
from ..tree import PLAIN, map_tensors, tensors

AnyPath = str | os.PathLike[str]
Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]
"""One, several, or several by name."""

_KINDS: dict[str, type] = {"model": nn.Module, "optimizer": Optimizer, "session": Session}


def check_path(path: Any) -> None:
    """`CheckpointError` for what no file can be called; `open` would take a number for a file that is open already."""
    named = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(named, str) or "\0" in named:
        raise CheckpointError(
            f"{path!r:.60} is no path of a file or folder: write a string without zero bytes, or a pathlib.Path, first "
            "and what belongs there by name, as in preamp.checkpoint.save(path, model=model, optimizer=optimizer)"
        )


def check_kind(what: str, value: Any, method: str = "state_dict") -> None:
    """`CheckpointError` unless `value` is a `what`, or, for wrappers of other libraries, has at least this method."""
    known = isinstance(value, Session) if what == "session" else hasattr(value, method)
    if not known or isinstance(value, (type, LRScheduler, *(_KINDS[name] for name in _KINDS.keys() - {what}))):
        raise CheckpointError(
            f"{what}= is, or holds, {kind_of(value)}, which is no {what} of a run. Give model= a module, optimizer= "
            "its optimizer, session= what prepare() returned; several in a flat list, or a dict by name; anything else "
            "to save() under another name, as step=step"
        )


def named(what: str, value: Any, method: str = "state_dict") -> dict[str, Any]:
    """Objects by the names of their states: "model" alone, "model:a" of several, "model:0" of a list; or an error."""
    if isinstance(value, (list, tuple)):
        value = value[0] if len(value) == 1 else {str(index): each for index, each in enumerate(value)}
    objects = {f"{what}:{name}": each for name, each in value.items()} if isinstance(value, Mapping) else {what: value}
    for each in objects.values():
        check_kind(what, each, method)
    return objects


def check_session(session: Any, models: Iterable[Any], optimizers: Iterable[Any]) -> None:
    """`CheckpointError` unless the session was prepared for a part of the models, or for what they are parts of.

    It must also have some of the parameters that the optimizers step.
    """
    if session is None:
        return
    check_kind("session", session)
    held = _parts(session.models.values())
    groups = [group for each in optimizers for group in getattr(each, "param_groups", ())]
    stepped = {parameter for group in groups for parameter in group["params"]}
    for whose, given in (("model= gives", _parts(models)), ("optimizer= steps", stepped)):
        if given and given.isdisjoint(held):
            raise CheckpointError(
                f"session= was prepared for other models than those that {whose}, and their masters would be missing. "
                "Give the session that prepare() returned for them; weights that are in no session (an average) are "
                "saved beside the model's, under a name of their own: average=average"
            )


def _parts(models: Iterable[Any]) -> set[Any]:
    modules = (each for each in models if isinstance(each, nn.Module))
    return {part for module in modules for part in (*module.modules(), *module.parameters())}


_VALUES = {*PLAIN, bytes, bytearray, complex, set}


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
    if kind in (list, tuple, torch.Size):
        for index, item in enumerate(value):
            check_loadable(item, f"{where}[{index}]")
    elif kind in (dict, OrderedDict, Counter):
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
