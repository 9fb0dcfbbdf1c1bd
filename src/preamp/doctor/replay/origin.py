"""Provenance: the first operator that makes a non-finite value out of finite ones, forward or backward.

A replay is shown operator by operator. Each non-finite tensor gets a trail back to where it
began; a trail counts only when it reaches the loss or a gradient, since an infinity that a `where`, a `clamp` or a
softmax removes again does no harm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...formats import name_of
from ...tree import tensors
from ..findings.pa201 import Operand, Origin
from ..measure import key_of, storage_of
from ..operators import Call, Observer
from ..places import UNINITIALISED, is_view

_CARRIERS = 20

_CONSTANTS = frozenset({
    "full", "full_like", "new_full", "fill", "masked_fill", "scalar_tensor", "index_fill",
    "constant_pad_nd", "lift", "lift_fresh", "lift_fresh_copy",
})  # fmt: skip
"""Operators that write a constant: what they write is meant to be there."""
_SAME = ("detach", "alias")
"""Autograd's own handling of saved tensors: not worth a carrier's line."""


@dataclass(slots=True)
class _Trail:
    """One non-finite beginning. `meant`: an infinity written on purpose, of this sign, and no origin (0: not so)."""

    origin: Origin
    number: int
    meant: float = 0.0
    carriers: dict[tuple[str | None, str, str], None] = field(default_factory=dict)


class Trails(Observer):
    """Keeps a trail for every storage that holds a non-finite value."""

    everywhere = True

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._sources: dict[int, str] = {}
        """Parameters and buffers by storage."""
        for path, module in modules:
            start = path if not path or path.endswith(":") else f"{path}."
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self._sources.setdefault(key_of(tensor), start + name)
        self._trails: dict[int, _Trail] = {}
        self._count = 0
        self._read: list[tuple[Tensor, Operand | None, _Trail | None]] = []
        """What the operator that runs has read; what it overwrites is described as it was before."""
        self._reached: list[_Trail] = []
        self.leaves: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = {}

    def before(self, call: Call) -> None:
        """Describe what is about to be overwritten."""
        read, written = list(tensors((call.args, call.kwargs))), {id(t) for t in call.written}
        self._note_leaf(read)
        self._read = [(t, _operand_of(t) if id(t) in written else None, self._trails.get(key_of(t))) for t in read]

    def after(self, call: Call) -> None:
        """Where it made something that is not finite, a trail begins or goes on."""
        read, self._read = self._read, []
        wrote, place = [*tensors(call.out), *call.written], call.place
        sick = [] if call.base in UNINITIALISED else [tensor for tensor in wrote if not _is_finite(tensor)]
        keys, aliased = {key_of(tensor) for tensor in sick}, {key_of(tensor) for tensor, _, _ in read}
        for tensor in wrote:
            # A part that is finite says nothing of the rest of its storage.
            storage = storage_of(tensor)
            whole = storage is None or tensor.numel() * tensor.element_size() >= storage.nbytes()
            if key_of(tensor) not in keys and (whole or key_of(tensor) not in aliased):
                self._trails.pop(key_of(tensor), None)
        if not sick:
            return
        inputs = [_operand_of(tensor) if operand is None else operand for tensor, operand, _ in read]
        bad = [(trail, t) for seen, (t, _, trail) in zip(inputs, read, strict=True) if seen.inf or seen.nan]
        if (is_view(call.func) or call.base == "copy") and not any(trail for trail, _ in bad):
            return  # data: who computes with it comes later
        output, made_by = _operand_of(sick[0]), (place.module, str(call.func), place.direction, *place.at)
        first = Origin(*made_by, tuple(inputs), output, "nan" if output.nan else "inf", own=place.own)
        first = replace(first, constants=tuple(call.numbers))
        trail = self._trail(call.base, first, bad, sick)
        for tensor in sick:
            self._trails[key_of(tensor)] = trail

    def _note_leaf(self, read: list[Tensor]) -> None:
        """What autograd adds to a leaf's gradient has arrived; a leaf's gradient is kept, to be put back."""
        node = torch._C._current_autograd_node()
        if node is None or node.name() != "torch::autograd::AccumulateGrad":
            return
        leaf: Tensor = node.variable  # type: ignore[attr-defined]
        if id(leaf) not in self.leaves:
            self.leaves[id(leaf)] = (leaf, leaf.grad, None if leaf.grad is None else leaf.grad.clone())
        for tensor in read:
            self._arrive(tensor)

    def _arrive(self, tensor: Tensor) -> None:
        """`tensor` is a result: if it is not finite, its trail counts."""
        trail = self._trails.get(key_of(tensor))
        if trail is not None and not _is_finite(tensor):
            self._reached.append(trail)

    def origin_of(self, results: Iterable[Tensor]) -> Origin | None:
        """Where these, or gradients that arrived before them, began to be not finite; None where all are finite."""
        for tensor in results:
            self._arrive(tensor)
        if not self._reached:
            return None
        trail = min(self._reached, key=lambda trail: (bool(trail.meant), trail.number))
        return replace(trail.origin, carriers=tuple(trail.carriers))

    def _trail(self, name: str, here: Origin, bad: list[tuple[_Trail | None, Tensor]], sick: list[Tensor]) -> _Trail:
        """The trail that the non-finite tensors `sick` lie on: one that came in, or a new one.

        `bad`: what came in and is not finite, with its trail.
        """
        signs: set[float | None] = {sign for tensor in sick for sign in _signs_of(tensor)}
        incoming = sorted((trail for trail, _ in bad if trail and not trail.meant), key=lambda trail: trail.number)
        if incoming:
            trail = incoming[0]
            if name not in _SAME and len(trail.carriers) < _CARRIERS:
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
                return self._new(replace(here, from_data=True, source=source))
        return self._new(here)

    def _new(self, origin: Origin, **facts: Any) -> _Trail:
        self._count += 1
        return _Trail(origin, self._count, **facts)


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
