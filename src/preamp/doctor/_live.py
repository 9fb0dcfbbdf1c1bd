"""One step of a running script under observation: its operators as they run, in the dtypes in which they really run.

Nothing is changed and nothing is run twice. What can only be told from numbers is told from these.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from ..formats import FP16, LOW_DTYPES, name_of
from ..report import Finding
from ..tree import tensors
from ._clock import Clock
from ._lint import without_repeats
from ._lint_buffers import BufferWatcher
from ._lint_constants import ConstantWatcher
from ._lint_eps import EpsWatcher
from ._lint_observe import Call, Watcher
from ._lint_range import RangeWatcher, SigmoidWatcher
from ._lint_shapes import ProductWatcher, unaligned
from ._lint_sums import SumWatcher
from ._lint_vanished import VanishedWatcher
from ._names import Names
from ._places import UNINITIALISED, Place, Places, key_of, written_by

NEAR_TOP = FP16.max / 4
"""Two bits below float16's largest number."""


_FILLS = frozenset({"masked_fill", "where", "clamp", "clamp_min", "clamp_max", "index_fill", "add", "mul", "sub"})


_BOUNDS = frozenset({"clamp", "clamp_min", "clamp_max", "clip", "hardtanh", "tanh"})
"""Operators that mean a size: of a gradient that is too large by a factor they make another one."""


class TopWatcher(Watcher):
    """PA205: float16 results within two bits of the largest number. The largest of a module and operator counts."""

    def __init__(self) -> None:
        self._tops: dict[tuple[str | None, str], tuple[float, tuple[str | None, int | None]]] = {}

    def after(self, call: Call) -> None:
        """Look at one result."""
        out = call.out if isinstance(call.out, Tensor) else None
        if out is None or out.dtype is not torch.float16 or not out.numel() or call.base in ("full", "fill"):
            return
        if not any(t.dtype is torch.float16 for t in call.inputs):
            return  # a cast: the number is older than this line
        top = float(out.abs().max())
        if top == FP16.max and call.base in _FILLS:
            return  # torch.finfo(dtype).min as a mask: meant to be there
        if NEAR_TOP <= top <= FP16.max and top > self._top(call):
            self._tops[call.module, call.base] = top, call.place()

    def _top(self, call: Call) -> float:
        kept = self._tops.get((call.module, call.base))
        return 0.0 if kept is None else kept[0]

    @property
    def findings(self) -> Iterator[Finding]:
        """The first of each module: what follows hands the same numbers on."""
        for (module, op), (top, (file, line)) in self._tops.items():
            yield Finding(
                "PA205", "warning",
                f"{op} gave {top:.5g} in float16, less than 2 bits below the largest number, 65504: a batch or a "
                "learning rate away from infinity",
                module=module, op=op, direction="forward", file=file, line=line,
                evidence={"largest magnitude": top, "dtype": "fp16", "headroom in bits": _bits(top)},
                fix="x = x.float()  # before this line, or scale what it multiplies: attention by 1 / sqrt(d), sums "
                "by 1 / n",
            )  # fmt: skip


def _bits(top: float) -> float:
    return round(math.log2(FP16.max / top), 2)


class Live(TorchDispatchMode):
    """Shows forward operators to the lint's watchers."""

    def __init__(
        self, names: Names, weights: Mapping[int, Tensor], clock: Clock, keeps_casts: Callable[[], bool],
        stop: CodeType | None = None,
    ) -> None:  # fmt: skip
        """`stop`: code of the function whose callers are not looked at, of a step that is done again."""
        super().__init__()
        self._keeps_casts = keeps_casts
        self.places = Places(names.get, names.owners, stop or Places.close.__code__)
        self.products = ProductWatcher()
        self._eps, self._constants, self._ranges = EpsWatcher(_Whole(names)), ConstantWatcher(), RangeWatcher()
        self._sigmoids, self._tops, self._sums = SigmoidWatcher(), TopWatcher(), SumWatcher()
        self._buffers = BufferWatcher()
        self._buffers.begin(names.items())
        self._vanished = VanishedWatcher()
        self._watchers: tuple[Watcher, ...] = (
            self._eps, self._constants, self._ranges, self._sigmoids, self._tops, self._sums, self._buffers,
            self._vanished,
            self.products,
        )  # fmt: skip
        self._names, self._weights, self._clock = names, weights, clock
        self.autocast_on = self.torchs_own = False
        """As it is where the model is called; below autocast, where this looks, it cannot be seen."""
        self.grad_keys: frozenset[int] = frozenset()
        """Storages of gradients that are still scaled."""
        self.reads: list[Place] = []
        """Where the script computed with them."""
        self.backward_scale = 1.0
        """On the loss that goes back."""
        self.hooked: list[tuple[Place, str]] = []
        """Where a hook of the script's bounds the gradient of a parameter, and by which operator."""
        self.paused = False
        """Whether what runs now is a library's own business."""
        self.writes: list[tuple[Place, Tensor]] = []
        """Where a weight was changed in place in the forward pass."""
        self.dtypes: dict[str, Counter[str]] = {}
        """How many floating results of each dtype each module gave, forward."""

    def stop(self) -> None:
        """Observe no more."""
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)
        self.places.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        call = None
        with self._clock:
            call = self._before(func, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        call.out = out = func(*args, **kwargs)
        with self._clock, torch.no_grad():
            for watcher in self._watchers if call.base not in UNINITIALISED else ():
                watcher.after(call)
            self._count(call)
        return out

    def _before(self, func: Any, args: Any, kwargs: Any) -> Call | None:
        """The operator that is about to run, as watchers see it; None for one of the backward pass."""
        written = written_by(func, args, kwargs)
        place = self.places.place(any(t._is_view() for t in written))
        if place.direction == "backward":
            if self.backward_scale != 1 and place.own is not None:
                self._in_hook(func, place)
            return None
        if self._keeps_casts():
            changed = [t if t._base is None else t._base for t in written]
            self.writes += [(place, t) for t in changed if id(t) in self._weights]
        if self.grad_keys and any(key_of(t) in self.grad_keys for t in tensors((args, kwargs))):
            self.reads.append(place)
        name = str(func).partition(".")[2].removesuffix(".default")
        call = Call(
            name, tuple(args), dict(kwargs), place.module, self.torchs_own, self.autocast_on,
            at=(place.file, place.line),
        )  # fmt: skip
        with torch.no_grad():
            for watcher in self._watchers:
                watcher.before(call)
        return call

    def _in_hook(self, func: Any, place: Place) -> None:
        """An operator of the script's own in the backward pass. Autograd functions are left to mean what they do."""
        base = func._schema.name.partition("::")[2].rstrip("_")
        node = torch._C._current_autograd_node()
        if base in _BOUNDS and node is not None and node.name() == "torch::autograd::AccumulateGrad":
            self.hooked.append((place, base))

    def _count(self, call: Call) -> None:
        if call.module is not None and isinstance(call.out, Tensor) and call.out.is_floating_point():
            self.dtypes.setdefault(call.module, Counter())[name_of(call.out.dtype)] += 1

    def findings(self) -> tuple[Finding, ...]:
        """What the watchers found, most harmful first."""
        found = [*self._eps.findings, *self._constants.findings, *self._ranges.findings, *self._sigmoids.findings]
        found += [*self._tops.findings, *self._sums.findings, *self._buffers.findings, *self._vanished.findings]
        if self.products.total:
            found += unaligned(self.products, _Whole(self._names))
        return without_repeats(found)

    @property
    def low(self) -> set[torch.dtype]:
        """16-bit dtypes of matrix products."""
        return {p.dtype for p in self.products.products.values() if p.dtype in LOW_DTYPES}


class _Whole(nn.Module):
    """All models of a script as one, for watchers that look a module up by path."""

    def __init__(self, names: Names) -> None:
        super().__init__()
        self._names = names

    def named_modules(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Module]]:
        """Paths as the doctor reports them."""
        return self._names.items()
