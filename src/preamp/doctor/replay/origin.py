"""Provenance: the first operator that makes a non-finite value out of finite ones, forward or backward.

A replay runs under a dispatch mode that sees every operator. Each non-finite tensor gets a trail back to where it
began; a trail counts only when it reaches the loss or a gradient, since an infinity that a `where`, a `clamp` or a
softmax removes again does no harm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...formats import name_of
from ...tree import tensors
from ..findings.pa201 import Operand, Origin
from ..names import Models, named_parts
from ..places import UNINITIALISED, Place, Places, key_of, storage_bytes, written_by
from .restore import eager, put_back_leaves, untouched

_CARRIERS = 20
_NO_NAMES: MappingProxyType[str, Any] = MappingProxyType({})

_CONSTANTS = frozenset({
    "full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "scalar_tensor",
    "index_fill", "index_fill_", "constant_pad_nd", "lift", "lift_fresh", "lift_fresh_copy",
})  # fmt: skip
"""Operators that write a constant: what they write is meant to be there."""
_MOVERS = frozenset({
    "_to_copy", "clone", "detach", "alias", "view", "_unsafe_view", "reshape", "t", "transpose", "permute",
    "expand", "slice", "select", "squeeze", "unsqueeze", "split", "unbind", "copy_", "cat", "stack",
    "index_select", "narrow", "unfold", "as_strided",
})  # fmt: skip
"""Operators that only hand data on: the next operator that computes with it is its first consumer."""
_SAME = ("detach", "alias")
"""Autograd's own handling of saved tensors: not worth a carrier's line."""


@dataclass(slots=True)
class _Trail:
    """One non-finite beginning. `meant`: an infinity written on purpose, of this sign, and no origin (0: not so)."""

    origin: Origin
    number: int
    meant: float = 0.0
    only_moved: bool = False
    carriers: dict[tuple[str | None, str, str], None] = field(default_factory=dict)


class _Observer(TorchDispatchMode):
    """Keeps a trail for every storage that holds a non-finite value."""

    def __init__(self, places: Places, sources: dict[int, str]) -> None:
        super().__init__()
        self._places = places
        self._sources = sources
        self._trails: dict[int, _Trail] = {}
        self._count = 0
        self.reached: list[_Trail] = []
        self.leaves: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or _NO_NAMES
        read = [*tensors(args), *tensors(dict(kwargs))]
        written = written_by(func, args, kwargs)
        place = self._places.place(any(tensor._is_view() for tensor in written))
        with torch.no_grad():
            self._note_leaf(read)
            old = {id(tensor): (_operand_of(tensor), self._trails.get(key_of(tensor))) for tensor in written}
        out = func(*args, **kwargs)
        with torch.no_grad():
            self._judge(func, read, old, (args, dict(kwargs)), [*tensors(out), *written], place)
        return out

    def _note_leaf(self, read: list[Tensor]) -> None:
        """What autograd adds to a leaf's gradient has arrived; a leaf's gradient is kept, to be put back."""
        node = torch._C._current_autograd_node()
        if node is None or node.name() != "torch::autograd::AccumulateGrad":
            return
        leaf: Tensor = node.variable  # type: ignore[attr-defined]
        if id(leaf) not in self.leaves:
            self.leaves[id(leaf)] = (leaf, leaf.grad, None if leaf.grad is None else leaf.grad.clone())
        for tensor in read:
            self.arrive(tensor)

    def arrive(self, tensor: Tensor) -> None:
        """`tensor` is a result: if it is not finite, its trail counts."""
        trail = self._trails.get(key_of(tensor))
        if trail is not None and not _is_finite(tensor):
            self.reached.append(trail)

    def _judge(
        self, func: Any, read: list[Tensor], old: Any, arguments: Any, wrote: list[Tensor], place: Place
    ) -> None:
        name = func._schema.name.rpartition("::")[2]
        sick = [] if name in UNINITIALISED else [tensor for tensor in wrote if not _is_finite(tensor)]
        keys, aliased = {key_of(tensor) for tensor in sick}, {key_of(tensor) for tensor in read}
        for tensor in wrote:
            # A part that is finite says nothing of the rest of its storage.
            whole = tensor.numel() * tensor.element_size() >= storage_bytes(tensor)
            if key_of(tensor) not in keys and (whole or key_of(tensor) not in aliased):
                self._trails.pop(key_of(tensor), None)
        if not sick:
            return
        # What it overwrote is described as it was before.
        pairs = [old.get(id(t)) or (_operand_of(t), self._trails.get(key_of(t))) for t in read]
        output = _operand_of(sick[0])
        first = Origin(
            place.module,
            str(func),
            place.direction,
            place.file,
            place.line,
            inputs=tuple(operand for operand, _ in pairs),
            output=output,
            kind="nan" if output.nan else "inf",
            constants=tuple(_numbers_in(arguments)),
            own=place.own,
        )
        trail = self._trail(name, first, pairs, read, sick)
        for tensor in sick:
            self._trails[key_of(tensor)] = trail

    def _trail(
        self,
        name: str,
        here: Origin,
        pairs: list[tuple[Operand, _Trail | None]],
        read: list[Tensor],
        sick: list[Tensor],
    ) -> _Trail:
        """The trail that the non-finite tensors `sick` lie on: one that came in, or a new one."""
        bad = [(trail, t) for (seen, trail), t in zip(pairs, read, strict=True) if seen.inf or seen.nan]
        signs: set[float | None] = {sign for tensor in sick for sign in _signs_of(tensor)}
        incoming = sorted((trail for trail, _ in bad if trail and not trail.meant), key=lambda trail: trail.number)
        if incoming:
            trail = incoming[0]
            if trail.only_moved and name not in _MOVERS:
                trail.only_moved = False
                trail.origin = replace(here, from_data=True, source=trail.origin.source)
                trail.carriers.clear()
            elif name not in _SAME and len(trail.carriers) < _CARRIERS:
                trail.carriers.setdefault((here.module, here.op, here.direction))
            return trail
        meant = [trail.meant for trail, _ in bad if trail]
        if meant and signs <= set(meant):
            return next(trail for trail, _ in bad if trail)  # a mask that is still one
        if not meant and name in _CONSTANTS and (not bad or name.startswith("lift")):
            wanted: set[float | None] = {number for number in here.constants if math.isinf(number)}
            if name.startswith("lift"):
                wanted = signs & {math.inf, -math.inf}
            if len(signs) == 1 and signs <= wanted:
                return self._new(here, meant=signs.pop())
        strangers = [t for trail, t in bad if trail is None]
        if strangers:
            seen = {sign for tensor in strangers for sign in _signs_of(tensor)}
            if seen == {-math.inf} and signs == seen:
                return self._new(here, meant=-math.inf)  # a mask that came in from outside
            softmax = seen == {-math.inf} and "softmax" in name
            if not softmax:
                source = next((self._sources[key_of(t)] for t in strangers if key_of(t) in self._sources), None)
                return self._new(replace(here, from_data=True, source=source), only_moved=name in _MOVERS)
        return self._new(here)

    def _new(self, origin: Origin, **facts: Any) -> _Trail:
        self._count += 1
        return _Trail(origin, self._count, **facts)


def find_origin(
    run: Callable[[], Any],
    *,
    models: Models,
    backward: Callable[[Tensor], None] | None = None,
    preserve: bool = True,
) -> Origin | None:
    """The first operator of a step that makes a non-finite value out of finite ones, or None for a healthy step.

    `run` does the forward pass and returns the loss: a tensor, or several in a list or a mapping, or None when it
    has done its own backward. Backward follows for each loss (together, when several), or `backward(loss)`, for
    instance to scale it; it is left out when the loss is already sick. `preserve`: gradients, buffers, training flags,
    random states and autocast's caches are afterwards as before, bit for bit; plain attributes of modules, and what
    the user's own hooks step, are not put back. Compiled models run eagerly. What `run` or `backward` raises is raised,
    after everything is put back.
    """
    return trace(lambda places: run(), models, backward, preserve)


def trace(
    run: Callable[[Places], Any], models: Models, backward: Callable[[Tensor], None] | None, preserve: bool = True
) -> Origin | None:
    """`find_origin`, for a `run` that knows better than the stack where its operators come from."""
    paths, owners, held = named_parts(models)
    places = Places(paths.get, owners, trace.__code__)
    observer = _Observer(places, {key_of(tensor): name for name, tensor in held})
    with ExitStack() as stack:
        stack.callback(places.close)
        if preserve:
            stack.enter_context(untouched(list(paths)))
            stack.callback(put_back_leaves, observer.leaves)
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # the mode lives on this thread
        stack.enter_context(eager())
        with observer:
            losses = list(tensors(run(places)))
        for loss in losses:
            observer.arrive(loss)
        if not observer.reached:
            with observer:
                _go_back([loss for loss in losses if loss.requires_grad], backward)
            for parameter in (p for module in paths for p in module._parameters.values()):
                if parameter is not None and parameter.grad is not None:
                    observer.arrive(parameter.grad)
    if not observer.reached:
        return None
    trail = min(observer.reached, key=lambda trail: (bool(trail.meant), trail.number))
    return replace(trail.origin, carriers=tuple(trail.carriers))


def _readable(tensor: Tensor) -> Tensor | None:
    """`tensor` in a form that can be counted, None when it has no floating values."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.layout is not torch.strided:
        return None
    if tensor.device.type == "meta" or tensor.numel() == 0 or tensor.is_quantized:
        return None
    if tensor.is_complex():
        return tensor.abs()
    return tensor.float() if tensor.element_size() == 1 else tensor


def _is_finite(tensor: Tensor) -> bool:
    values = _readable(tensor)
    return values is None or bool(values.isfinite().all())


def _signs_of(tensor: Tensor) -> set[float | None]:
    """Which non-finite values occur: -inf, inf, and None for NaN."""
    values = _readable(tensor)
    if values is None:
        return set()
    found = {sign for sign in (-math.inf, math.inf) if bool((values == sign).any())}
    return {*found, None} if bool(values.isnan().any()) else {*found}


def _operand_of(tensor: Tensor) -> Operand:
    """Facts of one tensor; range and counts are those of floating tensors."""
    name, shape = name_of(tensor.dtype), tuple(tensor.shape)
    values = _readable(tensor)
    if values is None:
        return Operand(name, shape, None, None, 0, 0)
    fine = values[values.isfinite()]
    low, high = (fine.min().item(), fine.max().item()) if fine.numel() else (None, None)
    return Operand(name, shape, low, high, int(values.isinf().sum()), int(values.isnan().sum()))


def _numbers_in(arguments: Any) -> Iterator[float]:
    """Python numbers among the arguments: a constant to fill with, an exponent, an epsilon."""
    positional, named = arguments
    for value in (*positional, *named.values()):
        if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
            yield float(value)


def _go_back(losses: list[Tensor], backward: Callable[[Tensor], None] | None) -> None:
    """Backward from all losses together, or by the caller's own function from each."""
    if backward is not None:
        for loss in losses:
            backward(loss)
    elif losses:
        torch.autograd.backward(losses)
