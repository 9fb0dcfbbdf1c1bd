"""Runs each operator on the shadows, too, and has compared what comes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...formats import LOW_DTYPES
from ...tree import PLAIN, map_tensors, tensors
from ..measure import key_of
from ..operators import Call, base_of
from ..places import UNINITIALISED, is_view
from ..records import Line
from .facts import spelled
from .judge import DECIDING, Judge
from .source import Readings
from .values import SHADOWED, WIDE, has_shadow

_EXACT = frozenset({
    "detach", "alias", "zeros_like", "ones_like", "lift_fresh", "_local_scalar_dense",
    "_amp_foreach_non_finite_check_and_unscale",
})  # fmt: skip
_FROM_WHOLE = frozenset({"_to_copy", "scalar_tensor", "full", "arange", "linspace", "logspace"})
"""Operators that make floating numbers of whole ones, or of numbers that are no tensors."""
_SCALE = frozenset({"mul", "div", "pow"})
"""Operators for which a small constant is no epsilon."""
BETWEEN = 10_000, 1 << 20
"""Operators between two steps that are followed, and how many numbers each may be given: weights are loaded there."""


class Shadowed(Judge):
    """Follows every operator with shadows.

    `between`: no model of the step has run yet, and only what has to do with 16 bits is followed; the others as `Judge`
    has them.
    """

    everywhere = True

    def __init__(self, limit: float | None = None, readings: Readings | None = None, *, between: bool = False) -> None:
        super().__init__(limit, Readings() if readings is None else readings)
        self.between = between
        self._seen_between = 0
        self.skipped: Counter[str] = Counter()
        """Operators that could not run on shadows, and how often."""
        self.operators = 0
        self._wide: tuple[list[Tensor], list[tuple[Tensor, Tensor]], float] | None = None
        """What the shadows gave, the new shadows of what is changed in place, and the error of these before."""
        self._given: set[int] = set()
        """Storages that the operator was given, which its results may have, too."""
        self._module: str | None = None
        self.constants: dict[Line, list[float]] = {}
        """Numbers that operators of a line were given."""

    def wants(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operator is followed."""
        if not self.between:
            return True
        self._seen_between += 1
        given = [*tensors(args)]
        if any(map(self.shadows.has, given)):  # what is written to a shadowed storage is
            return True
        if self._seen_between > BETWEEN[0] or any(t.numel() > BETWEEN[1] for t in given):
            return False
        low = kwargs.get("dtype") in LOW_DTYPES or any(t.dtype in LOW_DTYPES for t in given)
        return low or (base_of(func) in _FROM_WHOLE and _default_is_low())

    def before(self, call: Call) -> None:
        """Run the operator on the shadows of what it is about to read."""
        self._wide = None
        if call.base == "_local_scalar_dense":
            self.note_read(call)
        if call.place.module != self._module:
            self._module = call.place.module
            self.shadows.module_changed()
        if not _follows(call):
            return
        line = call.place.at
        self.readings.note(line)
        scales = call.base in _SCALE
        numbers = [n for n in call.args if type(n) is float and not (scales and abs(n) < 0.5)]
        if numbers and line[0] is not None:
            self.constants.setdefault(line, []).extend(numbers[:4] if len(self.constants.get(line, ())) < 64 else ())
        changed = {id(t): self.shadows.of(t).clone() for t in call.written if has_shadow(t)}
        error = max((self.error_of(t) for t in call.written if has_shadow(t)), default=0.0)
        self._given.clear()

        def shadow(tensor: Tensor) -> Tensor:
            found = changed[id(tensor)] if id(tensor) in changed else self.shadows.of(tensor)
            self._given.add(key_of(found))
            return found

        try:
            out = self._run(call, shadow, WIDE)
        except Exception:
            self.skipped[call.base] += 1
        else:
            self._wide = out, [(t, changed[id(t)]) for t in call.written if id(t) in changed], error

    def after(self, call: Call) -> None:
        """Compare what came out with what came out of the shadows."""
        wide, self._wide = self._wide, None
        if wide is None:
            for tensor in call.written:
                self.shadows.forget(tensor)
            mean = call.args[0] if call.base == "normal" else None
            if isinstance(mean, Tensor) and has_shadow(mean):  # as far from its mean as the number drawn
                self.shadows.give(call.out, call.out + (self.shadows.of(mean) - mean), own=True)
            return
        self.operators += 1
        outs, changed, before = wide
        for tensor, exact in changed:
            self.judge(call, tensor, exact, before)
            self.shadows.of(tensor).copy_(exact)
        written = {id(t) for t in call.written}
        read, gave = tuple(dict.fromkeys(map(key_of, call.given))), [*tensors(call.out)]
        for tensor in (*gave, *call.written):
            self._trail[key_of(tensor)] = call.place.at, read
        for out, exact in zip(gave, outs, strict=False):
            if id(out) in written or out.shape != exact.shape:
                continue
            if has_shadow(out) and exact.dtype is WIDE:
                self.judge(call, out, exact, 0.0)
                self.shadows.give(out, exact, own=key_of(exact) not in self._given)
            elif out.dtype is exact.dtype and not out.is_floating_point() and call.base in DECIDING:
                self.judge_decision(call, out, exact)

    def told(self) -> dict[str, Any]:
        """What was followed, for the record."""
        skipped = {spelled(n): c for n, c in self.skipped.most_common() if not n.startswith("_amp_")}  # a scaler's
        return {"operators": self.operators, "skipped": skipped, "whole": self.shadows.whole}

    @staticmethod
    def _run(call: Call, shadow: Callable[[Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Run the operator with shadows in place of its tensors, in this dtype."""

        def wide(value: Any) -> Any:
            if isinstance(value, Tensor):
                return shadow(value) if has_shadow(value) else value
            if type(value) in PLAIN:
                return dtype if value in SHADOWED else value
            return map_tensors(wide, value)

        kwargs = {name: wide(value) for name, value in call.kwargs.items()}
        if call.base in _FROM_WHOLE and kwargs.get("dtype") is None and _default_is_low():
            kwargs["dtype"] = dtype
        return [*tensors(call.func(*map(wide, call.args), **kwargs))]

    def nudged(self, call: Call) -> list[Tensor]:
        """What the operator gives, computed in float64, for inputs that are a rounding of float32 beside the right
        ones; with what it changes in place first.
        """
        beside: dict[int, Tensor] = {}

        def nudged(tensor: Tensor) -> Tensor:
            if id(tensor) not in beside:
                beside[id(tensor)] = _rounded(self.shadows.of(tensor), len(beside))
            return beside[id(tensor)]

        changed = [nudged(tensor) for tensor in call.written if has_shadow(tensor)]
        try:
            return [*changed, *self._run(call, nudged, torch.float64)]
        except Exception:
            return []


def _follows(call: Call) -> bool:
    """Whether an operator runs on shadows: it reads floating numbers, or makes them of whole ones, and draws none."""
    func, base = call.func, call.base
    if call.place.ours:
        return False
    if base in _EXACT or base in UNINITIALISED or func.namespace != "aten" or is_view(func):
        return False
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if base.endswith("_backward") and any(t.dtype is torch.uint8 for t in call.given):
        return False  # bytes that the forward pass left, of a recurrent layer: in float32 they are others, and more
    return any(map(has_shadow, call.given)) or base in _FROM_WHOLE


def _default_is_low() -> bool:
    return torch.get_default_dtype() in LOW_DTYPES


def _rounded(shadow: Tensor, seed: int) -> Tensor:
    """A shadow in float64, each number off by chance by as much as float32 rounds; but for counts, which are exact."""
    chance = torch.Generator(shadow.device).manual_seed(seed)
    wide = shadow.to(torch.float64)
    off = torch.rand(wide.shape, dtype=torch.float64, device=wide.device, generator=chance).sub_(0.5).mul_(2.0**-23)
    return torch.where((wide == wide.round()) & (wide.abs() < 2**23), wide, wide + wide * off)
