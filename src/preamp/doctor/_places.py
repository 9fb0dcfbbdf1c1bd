"""Where an operator was run from (module, source line, direction), and a replay that leaves no trace behind."""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from types import CodeType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..formats import name_of
from ..tree import tensors
from ._random import random_kept
from ._stack import Frames, walk

Models = nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module]

UNINITIALISED = frozenset({
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
})  # fmt: skip
"""Operators whose results are whatever lay there."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operator ran; `own` is the line of a backward written in Python, None for every other."""

    module: str | None
    file: str | None
    line: int | None
    direction: Literal["forward", "backward"]
    own: tuple[str, int] | None = None


class Places:
    """Follows modules by hooks and autograd nodes by sequence number, so that any operator has a place.

    `named`: the path of a module, or the default given with it; `stop`: code of the function whose callers are not
    looked at. The observation begins when this is made (sequence numbers go on counting from there), and `close`
    removes the hooks.
    """

    def __init__(
        self, named: Callable[[nn.Module, str | None], str | None], parameters: Mapping[int, str], stop: CodeType
    ) -> None:
        self._named = named
        self._parameters = parameters
        self._stop = stop
        self._stack: list[tuple[nn.Module, str | None]] = []
        self._made_by: dict[int, Place] = {}
        self._seen = torch._C._autograd._get_sequence_nr()
        self._last: Place | None = None
        self._copy_slices = False
        self.forced: Place | None = None
        """Where forward operators are said to run, whatever the stack tells: a replay has no line of the user's."""
        self._handles: tuple[Any, ...] = (
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        )

    def close(self) -> None:
        """Let go of torch's global hooks."""
        for handle in self._handles:
            handle.remove()

    def entered(self, module: nn.Module) -> None:
        """A module was entered before the hooks were there."""
        self._enter(module, None)

    def _enter(self, module: nn.Module, _: Any) -> None:
        # A module that is not the models' own (a wrapper made on the fly) belongs to the one that calls it.
        self._stack.append((module, self._named(module, self._stack[-1][1] if self._stack else None)))

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        # Down to this module, not just one: what an exception left behind goes too.
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index][0] is module:
                del self._stack[index:]
                return

    def place(self, writes_view: bool) -> Place:
        """The place of the operator about to run; `writes_view`: it changes a view in place."""
        node = torch._C._current_autograd_node()
        frames = walk(self._stop)
        place = self._resolve(node, frames)
        made = place if frames.applied[0] is None else replace(place, file=frames.applied[0], line=frames.applied[1])
        self._note_nodes(made, writes_view)
        return place

    def _resolve(self, node: Any, frames: Frames) -> Place:
        inside = self._stack[-1][1] if self._stack else None
        if node is None and self.forced is not None:
            return self.forced
        if node is None:
            return Place(inside, *frames.source, "forward")
        maker = self._made_by.get(node._sequence_nr())
        module = inside if self._stack else maker.module if maker else None
        if node.name() == "torch::autograd::AccumulateGrad":
            module = self._parameters.get(id(node.variable))
        if frames.recomputed and torch.is_grad_enabled():
            return Place(module, *frames.source, "forward")
        file, line = (maker.file, maker.line) if maker else frames.own or (None, None)
        return Place(module, file, line, "backward", frames.own)

    def _note_nodes(self, place: Place, writes_view: bool) -> None:
        """Give the nodes made since the last operator to who made them.

        A node is made just before its operator is dispatched, so all new numbers are this operator's; only the
        CopySlices node of an in-place operator on a view comes after its operator, and is the first new number here.
        """
        now = torch._C._autograd._get_sequence_nr()
        for number in range(self._seen, now):
            late = self._copy_slices and self._last is not None and number == self._seen
            self._made_by[number] = cast(Place, self._last) if late else place
        self._copy_slices = writes_view and now > self._seen
        self._seen, self._last = max(now, self._seen), place


def named_parts(models: Models) -> tuple[dict[nn.Module, str], dict[int, str], list[tuple[str, Tensor]]]:
    """Module paths by module, the owner's path by id of parameter, and every parameter and buffer by path.

    Paths are those of `named_modules` without a compiler's `_orig_mod`; with several models each is `name:path`.
    """
    if isinstance(models, nn.Module):
        parts = [("", models)]
    elif isinstance(models, Mapping):
        single = len(models) == 1
        parts = [("" if single else f"{name}:", model) for name, model in models.items()]
    else:
        single = len(models) == 1
        parts = [("" if single else f"{index}:", model) for index, model in enumerate(models)]
    paths: dict[nn.Module, str] = {}
    owners: dict[int, str] = {}
    held: list[tuple[str, Tensor]] = []
    for prefix, model in parts:
        for path, module in model.named_modules():
            clean = ".".join(word for word in path.split(".") if word != "_orig_mod")
            paths.setdefault(module, prefix + clean)
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    owners.setdefault(id(tensor), paths[module])
                    held.append((f"{prefix}{clean}.{name}" if clean else prefix + name, tensor))
    return paths, owners, held


@contextmanager
def untouched(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Gradients, buffers, training flags and random states on leaving as they were on entering; autocast caches empty.

    Inside, the parameters have no gradients, so that those found afterwards are the replay's own. What modules keep
    as plain attributes, and parameters that hooks of the user's step, are not put back.
    """
    parameters = {id(p): p for module in modules for p in module._parameters.values() if p is not None}
    grads = [(p, p.grad) for p in parameters.values()]
    tables = [(module, dict(module._buffers), module.training) for module in modules]
    distinct = {id(b): b for _, buffers, _ in tables for b in buffers.values() if b is not None}
    copies = [(b, b.detach().clone()) for b in distinct.values()]
    torch.clear_autocast_cache()  # a cached cast would hide that it overflows
    with ExitStack() as stack:
        stack.enter_context(random_kept())
        # A graph of the caller's that saved a buffer still finds the version it saved.
        for buffer in distinct.values():  # one by one: torch 2.6 takes no more
            stack.enter_context(_unsafe_preserve_version_counter(buffer))
        try:
            for parameter, _ in grads:
                parameter.grad = None
            yield
        finally:
            for parameter, grad in grads:
                parameter.grad = grad
            for module, buffers, training in tables:
                module._buffers.clear()
                module._buffers.update(buffers)
                module.training = training
            with torch.no_grad():
                for buffer, copy in copies:
                    buffer.copy_(copy)
            torch.clear_autocast_cache()


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor that went in or came out: range over its finite entries (None without any), counts of the others."""

    dtype: str
    shape: tuple[int, ...]
    min: float | None
    max: float | None
    inf: int
    nan: int

    def __str__(self) -> str:
        """Dtype, shape and range in one line."""
        span = "nothing finite" if self.min is None else f"{self.min:.4g} to {self.max:.4g}"
        bad = "".join(f", {count} {name}" for name, count in (("inf", self.inf), ("nan", self.nan)) if count)
        return f"{self.dtype}{list(self.shape)} {span}{bad}"


def key_of(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return -id(tensor)  # sparse and other tensors without one storage


def storage_bytes(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return 0


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among the arguments that the operator changes."""
    found: list[Tensor] = []
    for index, name in _written(func):
        found.extend(tensors(args[index] if index < len(args) else kwargs.get(name)))
    return found


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that an operator changes."""
    return tuple(
        (index, argument.name) for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )  # fmt: skip


def _readable(tensor: Tensor) -> Tensor | None:
    """`tensor` in a form that can be counted, None when it has no floating values to look at."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.layout is not torch.strided:
        return None
    if tensor.device.type == "meta" or tensor.numel() == 0 or tensor.is_quantized:
        return None
    if tensor.is_complex():
        return tensor.abs()
    return tensor.float() if tensor.element_size() == 1 else tensor


def is_finite(tensor: Tensor) -> bool:
    values = _readable(tensor)
    return values is None or bool(values.isfinite().all())


def signs_of(tensor: Tensor) -> set[float | None]:
    """Which non-finite values occur: -inf, inf, and None for NaN."""
    values = _readable(tensor)
    if values is None:
        return set()
    found = {sign for sign in (-math.inf, math.inf) if bool((values == sign).any())}
    return {*found, None} if bool(values.isnan().any()) else {*found}


def operand_of(tensor: Tensor) -> Operand:
    """Facts of one tensor; range and counts are those of floating tensors."""
    name, shape = name_of(tensor.dtype), tuple(tensor.shape)
    values = _readable(tensor)
    if values is None:
        return Operand(name, shape, None, None, 0, 0)
    fine = values[values.isfinite()]
    low, high = (fine.min().item(), fine.max().item()) if fine.numel() else (None, None)
    return Operand(name, shape, low, high, int(values.isinf().sum()), int(values.isnan().sum()))


def put_back_leaves(leaves: dict[int, tuple[Tensor, Tensor | None, Tensor | None]]) -> None:
    """Give each (leaf, gradient, copy of its values) the gradient it had."""
    with torch.no_grad():
        for leaf, grad, copy in leaves.values():
            if grad is not None and copy is not None:
                grad.copy_(copy)
            leaf.grad = grad


@contextmanager
def eager() -> Iterator[None]:
    """Compiled functions run as written: operators inside a compiled kernel cannot be seen."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        # The hooks also fire for the compiler's wrapper; it has the path of what it wraps, so nothing is off.
        warnings.filterwarnings("ignore", message="Using `torch.compile", category=UserWarning)
        yield


@contextmanager
def unheard() -> Iterator[None]:
    """What a model prints, logs or warns of it has said when it ran for the script."""
    silenced = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            open(os.devnull, "w", encoding="utf-8") as nowhere,
            redirect_stdout(nowhere),
            redirect_stderr(nowhere),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(silenced)


def numbers_in(arguments: Any) -> Iterator[float]:
    """Python numbers among the arguments: a constant to fill with, an exponent, an epsilon."""
    positional, named = arguments
    for value in (*positional, *named.values()):
        if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
            yield float(value)


def go_back(losses: list[Tensor], backward: Callable[[Tensor], None] | None) -> None:
    """Backward from all losses together, or by the caller's own function from each."""
    if backward is not None:
        for loss in losses:
            backward(loss)
    elif losses:
        torch.autograd.backward(losses)
