"""What a tape keeps of a step: calls of models, operators, random states, tensors that were about to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ...machine import set_random_state
from ..measure import key_of, storage_of
from ..places import Place
from ..records import Line
from . import restore

Key = tuple[Any, ...]
Named = Callable[[nn.Module], str | None]
"""The path of a module."""


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
    buffers: list[tuple[nn.Module, str, Tensor, Tensor, int]]
    """Owner, name, the tensor, a copy of its numbers and its version: a forward may change it, or put another there."""
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    attributes: dict[nn.Module, dict[str, Any]]
    """Plain attributes of every part: a counter, a temperature, `training`."""
    at: Line
    """The line that called it."""
    outputs: list[Key | None] = field(default_factory=list)


@dataclass(slots=True)
class Op:
    """An operator ran, or `torch.autograd.grad` with a graph of its own: part of a loss that has gradients in it."""

    func: Any
    args: Any
    kwargs: Any
    outputs: list[Key]
    grad: bool
    place: Place
    in_region: bool = False
    """Whether an autocast region was entered, which casts what products read."""


class RandomState(NamedTuple):
    """Random numbers were about to be drawn."""

    state: Any


class KeptTensor(NamedTuple):
    """A tensor of the script's that an operator was about to change."""

    key: Key
    value: Tensor


def tensor_key(tensor: Tensor) -> Key:
    """Which numbers a tensor is: views of the same ones have the same key."""
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return (key_of(tensor), tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def call_again(call: ModelCall, args: Any, kwargs: Any) -> Any:
    """Call a model as it was called, with the random state, buffers and attributes of then."""
    set_random_state(call.random)
    with torch.no_grad():
        for part, name, buffer, before, version in call.buffers:
            part._buffers[name] = buffer
            if buffer._version != version:  # else it has the shadow that it had
                buffer.copy_(before)
    restore.put_back(call.attributes)
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        for kind, on, dtype in call.autocast:
            stack.enter_context(_autocast_as(kind, on, dtype))
        return call.module(*args, **kwargs)


@contextmanager
def _autocast_as(kind: str, on: bool, dtype: torch.dtype) -> Iterator[None]:
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, on)
    torch.set_autocast_dtype(kind, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])


def identity_of(tensor: Tensor) -> StorageWeakRef | None:
    """The identity of its storage; None for a tensor without one."""
    storage = storage_of(tensor)
    return None if storage is None else StorageWeakRef(storage)
