"""What is checked of arguments before anything is read, written or changed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..errors import CheckpointError, kind_of
from ..session import Session

_KINDS: dict[str, type] = {"model": nn.Module, "optimizer": Optimizer, "session": Session}


def check_path(path: Any) -> None:
    """`CheckpointError` for what no file can be called."""
    named = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(named, str) or "\0" in named:
        raise CheckpointError(
            f"{path!r:.60} is no path of a file or folder: write a string without zero bytes, or a pathlib.Path"
        )


def check_devices(map_location: Any) -> None:
    """`CheckpointError` for a place to load to that is not on this machine."""
    for each in map_location.values() if isinstance(map_location, Mapping) else [map_location]:
        try:
            if isinstance(each, (str, torch.device)):
                torch.empty(0, device=each)
            elif each is not None and not callable(each):
                raise TypeError(f"{kind_of(each)} names no device")
        except Exception as error:  # torch has a type of its own for each reason
            raise CheckpointError(
                f"map_location={map_location!r:.60}: tensors cannot be put there ({str(error).partition(chr(10))[0]}). "
                "Write 'cpu' or a device of this machine; what is loaded into objects goes to where those are"
            ) from error


def check_kind(what: str, value: Any, method: str = "state_dict", verb: str = "is") -> None:
    """`CheckpointError` unless `value` is a `what`, or, for wrappers of other libraries, has at least this method."""
    known = isinstance(value, Session) if what == "session" else hasattr(value, method)
    if not known or isinstance(value, (type, LRScheduler, *(_KINDS[name] for name in _KINDS.keys() - {what}))):
        raise CheckpointError(
            f"{what}= {verb} {kind_of(value)}, which is no {what} of a run. Give model= a module, optimizer= "
            "its optimizer, session= what prepare() returned; several in a flat list, or a dict by name; anything else "
            "to save() under another name, as step=step"
        )


def by_name(what: str, value: Any, method: str = "state_dict") -> Any:
    """Several objects by name: those of a list are "0", "1", ..., as `prepare` names them; one alone has no name.

    `CheckpointError` if one is of another kind.
    """
    if isinstance(value, (list, tuple)):
        value = value[0] if len(value) == 1 else {str(index): each for index, each in enumerate(value)}
    several = isinstance(value, Mapping)
    for each in value.values() if several else [value]:
        check_kind(what, each, method, "holds" if several else "is")
    return value


def check_session(session: Any, model: Any, optimizer: Any = None) -> None:
    """`CheckpointError` unless the session was prepared for a part of the models, or for what they are parts of.

    It must also have some of the parameters that the optimizers step.
    """
    if session is None:
        return
    check_kind("session", session)
    held = _parts(session.models.values())
    groups = [group for each in _each(optimizer) for group in getattr(each, "param_groups", ())]
    stepped = {parameter for group in groups for parameter in group["params"]}
    for whose, given in (("model= gives", _parts(_each(model))), ("optimizer= steps", stepped)):
        if given and given.isdisjoint(held):
            raise CheckpointError(
                f"session= was prepared for other models than those that {whose}: its masters would take the place of "
                "their weights. Give the session that prepare() returned for them; weights that are in no session (an "
                "average) are saved beside the model's, under a name of their own: average=average"
            )


def _each(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else [value]


def _parts(models: Iterable[Any]) -> set[Any]:
    modules = (each for each in models if isinstance(each, nn.Module))
    return {part for module in modules for part in (*module.modules(), *module.parameters())}
