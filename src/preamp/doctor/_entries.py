"""What a tape keeps of a step: model calls, operators, random states, tensors about to be changed."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ._places import Place, key_of
from ._stack import Line

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a tensor that the replay makes itself."""

    key: Key


@dataclass(slots=True)
class ModelCall:
    """A model was called."""

    module: nn.Module
    args: Any
    kwargs: Any
    random: Any
    buffers: list[tuple[nn.Module, str, Tensor, Tensor]]
    """Owner, name, the tensor and a copy of its numbers: a forward may change it or put another in its place."""
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    attributes: dict[nn.Module, dict[str, Any]]
    """Plain attributes of every part: a counter, a temperature, `training`."""
    at: Line
    """Who called it."""
    outputs: list[Key | None] = field(default_factory=list)


@dataclass(slots=True)
class Op:
    """An operator ran, or `torch.autograd.grad` with a graph of its own."""

    func: Any
    args: Any
    kwargs: Any
    outputs: list[Key]
    grad: bool
    place: Place
    modules: tuple[nn.Module, ...]
    """Modules that were running, the innermost first: one without parameters is not kept as a call."""


class Grad:
    """`torch.autograd.grad`, as an operator: part of a loss that has gradients in it."""

    _schema = SimpleNamespace(name="preamp::grad")

    def __init__(self, original: Any) -> None:
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Ask for the gradients once more."""
        return self._original(*args, **kwargs)


@dataclass(slots=True)
class RandomState:
    """Random numbers were about to be drawn."""

    state: Any


@dataclass(slots=True)
class KeptTensor:
    """A tensor of the script's that an operator was about to change."""

    key: Key
    value: Tensor


def tensor_key(tensor: Tensor) -> Key:
    """Which numbers a tensor is: views of the same ones have the same key."""
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return (key_of(tensor), tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def parts_of(module: nn.Module) -> list[nn.Module]:
    """`module.modules()`, in a fraction of its time: this is asked in every step."""
    found = {module: None}
    left = [module]
    while left:
        for child in left.pop()._modules.values():
            if child is not None and child not in found:
                found[child] = None
                left.append(child)
    return list(found)


_CHANGEABLE: frozenset[type] = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """All its attributes, with lists, dicts and sets copied; asked in every step, sorted out by `put_back`."""
    kept = module.__dict__.copy()
    if module.__class__.__module__.startswith("torch.nn.modules."):
        return kept  # most are of torch's own, which change none of theirs
    for name, value in module.__dict__.items():
        if value.__class__ in _CHANGEABLE and not name.startswith("_"):
            kept[name] = copy.copy(value)
    return kept


def put_back(kept: Mapping[nn.Module, dict[str, Any]]) -> None:
    """Give modules the attributes again that `attributes_of` found, but for torch's own: a counter, `training`."""
    for module, attributes in kept.items():
        for name, value in attributes.items():
            if not name.startswith("_"):  # a copy again: the next replay is to find what this one found
                vars(module)[name] = copy.copy(value) if value.__class__ in _CHANGEABLE else value
