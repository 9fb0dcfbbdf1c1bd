"""What a script does with weights and gradients by operators of its own: it reads, bounds, unscales and clips them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..tree import tensors
from .measure import key_of
from .names import Names
from .operators import Call, Observer
from .places import Place

_BOUNDS = frozenset({"clamp", "clamp_min", "clamp_max", "clip", "hardtanh", "tanh"})
"""Operators that mean a size: of a gradient that is too large by a factor they make another one."""
_MEASURES = frozenset({"linalg_vector_norm", "norm", "pow", "square", "sum", "max", "amax", "abs"})
_CHANGES = frozenset({"mul", "div", "copy"})
"""Operators that measure a gradient, and that change one: in place after the others, by what was measured."""
_LOOKS = frozenset({
    "view", "_unsafe_view", "detach", "alias", "_to_copy", "t", "transpose", "permute", "slice", "select",
})  # fmt: skip
"""Operators that hand numbers on."""


class Handled(Observer):
    """What the script does with weights and gradients by operators of its own."""

    everywhere = True

    def __init__(
        self,
        names: Names,
        keeps_casts: Callable[[], bool] = lambda: False,
        is_library: Callable[[], bool] = lambda: False,
        unscaled: Callable[[], None] = lambda: None,
    ) -> None:
        self._names, self._keeps_casts, self._is_library, self._unscaled = names, keeps_casts, is_library, unscaled
        self._weights = {key_of(p): p for p in names.parameters()}
        self.gradients: frozenset[int] = frozenset()
        """Storages of gradients that are still scaled."""
        self.reads: list[Place] = []
        """Where the script computed with them."""
        self._measured: set[int] = set()
        self.clipped: list[tuple[Place, str]] = []
        """Where it bounds them, or changes them in place once it has measured them, and by which operator."""
        self.backward_scale = 1.0
        """On the loss that goes back."""
        self.bounded: list[tuple[Place, str]] = []
        """Where a hook of the script's bounds the gradient of a parameter, and by which operator."""
        self._asked: dict[int, float] = {}
        """Storages of gradients that the script asked for, to compute with them, and the scale that is on them."""
        self._used: list[tuple[Place, str, float]] = []
        self._divides = False
        """Whether it divides anything by that scale."""
        self.in_region = False
        """Whether the model was called in an autocast region."""
        self.writes: list[Place] = []
        """Where weights were changed in place in the forward pass, while a region keeps casts of them."""
        self._written: list[Tensor] = []

    @property
    def written(self) -> str | None:
        """The module that owns those weights."""
        return self._names.common(self._written)

    @property
    def used(self) -> list[tuple[Place, str, float]]:
        """Where it computes a part of its loss of such gradients, by which operator, and never divides by the scale."""
        return [] if self._divides else self._used

    def ask(self, grads: Sequence[Tensor | None], scale: float) -> None:
        """The script has asked for gradients of something that is multiplied by a scale."""
        self._asked |= {key_of(grad): scale for grad in grads if grad is not None}

    def before(self, call: Call) -> None:
        """Note one operator. Autograd functions are left to mean what they do."""
        place = call.place
        if place.direction == "forward":
            written = [self._weights[key_of(t)] for t in call.written if key_of(t) in self._weights]
            if written and self.in_region and self._keeps_casts():
                self.writes.append(place)
                self._written += written
            scaled = {key_of(t) for t in tensors((call.args, call.kwargs))} & self.gradients
            if scaled and not self._is_library():
                self._note_reading(call, scaled)
            if self._asked:
                self._note_use(call)
        elif self.backward_scale != 1 and place.own is not None and call.base in _BOUNDS:
            node = torch._C._current_autograd_node()
            if node is not None and node.name() == "torch::autograd::AccumulateGrad":
                self.bounded.append((place, call.base))

    def _note_use(self, call: Call) -> None:
        taken = [self._asked[key_of(t)] for t in call.inputs if key_of(t) in self._asked and t.requires_grad]
        if any(_is_unscaled(call, scale) for scale in self._asked.values()):
            self._divides = True
        elif taken and call.base not in _LOOKS:
            self._used.append((call.place, call.base, taken[0]))

    def _note_reading(self, call: Call, scaled: set[int]) -> None:
        if _is_unscaled(call, self.backward_scale):  # by hand, in place or into others: true from here on
            self.gradients -= scaled
            self._unscaled()
            return
        name = _name_of(call)
        if name not in _LOOKS:
            self.reads.append(call.place)
        if name in _MEASURES:
            self._measured |= scaled
        written = {key_of(t) for t in call.written} & scaled
        if written and (name in _BOUNDS or (name in _CHANGES and not written.isdisjoint(self._measured))):
            self.clipped.append((call.place, name))


def _name_of(call: Call) -> str:
    """What an operator does, to one tensor or to several."""
    return call.base.removeprefix("_foreach_").rstrip("_")


def _is_unscaled(call: Call, scale: float) -> bool:
    """Whether an operator divides by a scale, or multiplies by its inverse."""
    by = call.args[1] if len(call.args) > 1 else None
    if _name_of(call) not in ("mul", "div") or not isinstance(by, (int, float, Tensor)):
        return False
    if isinstance(by, Tensor) and by.numel() != 1:
        return False
    return math.isclose(float(by), 1 / scale if _name_of(call) == "mul" else scale, rel_tol=1e-3)
