"""Operators as they run, shown one by one to observers; and what of them are matrix products and convolutions.

The dispatch mode sits below autocast and autograd, so it sees operators in the dtypes in which they really run.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from ..formats import LOW_DTYPES
from ..report import Finding
from ..tree import tensors
from .hooks import Clock, is_traced
from .places import Place, Places, written_by
from .records import Line

Dims = tuple[tuple[str, int], ...]


@dataclass(slots=True)
class Call:
    """One operator call, as observers see it."""

    func: Any
    """What the dispatcher was to run."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: Place
    written: list[Tensor]
    """The tensors that it changes."""
    grad_enabled: bool
    given: list[Tensor]
    """The tensors among the arguments."""
    out: Any = None

    @property
    def base(self) -> str:
        """The operator without overload and in-place underscore."""
        return base_of(self.func)

    @property
    def inputs(self) -> list[Tensor]:
        """Floating tensors among the arguments."""
        return [t for t in self.given if t.is_floating_point()]

    @property
    def numbers(self) -> list[float]:
        """Numbers among the arguments, also tensors of the CPU's without dimensions beside others; no loss is one."""
        given = (*self.args, *self.kwargs.values())
        if any(tensor.dim() for tensor in self.given):
            alone = (each for each in given if isinstance(each, Tensor) and each.is_cpu and not each.dim())
            given += tuple(each.item() for each in alone if not each.requires_grad)
        return [float(each) for each in given if type(each) in (int, float)]


@cache
def base_of(func: Any) -> str:
    """An operator's name without namespace, overload and in-place underscore; "" of a function."""
    name = str(func).split(".")[1] if isinstance(func, torch._ops.OpOverload) else ""
    return name if name.startswith("_") else name.rstrip("_")


class Observer:
    """Is shown operator calls. The base class does nothing."""

    everywhere: ClassVar[bool] = False
    """Whether it is shown the backward pass, too, and what an optimizer does."""
    found: Iterable[Finding] = ()
    """What it has found so far."""

    def wants(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether it is shown an operator, decided before anything is asked about its place."""
        return True

    def before(self, call: Call) -> None:
        """Before the operator runs."""

    def after(self, call: Call) -> None:
        """After it ran; the result is in `call.out`."""

    def failed(self, error: Exception) -> None:
        """In place of `after`: the operator has raised this."""


class Stream(TorchDispatchMode):
    """Shows operators to observers, which come and go. Errors of theirs are the clock's; those of operators are raised.

    `places`: makes what knows where operators run, when the first observer comes; `applies`: whether operators of this
    thread are shown. The mode is there as long as an observer is.
    """

    def __init__(self, places: Callable[[], Places], clock: Clock, applies: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self._make_places, self._clock, self._applies = places, clock, applies
        self._places: Places | None = None
        self._observers: list[Observer] = []
        self._threads: dict[int, bool] = {}
        """Those in which the mode is there, each of which has modes of its own; and whether it came in inference mode.

        What came before inference mode stays in it: on leaving that, torch calls the modes that there were before.
        """
        self._is_given_up = False
        self.is_paused = False
        """Whether what runs now is a library's own business."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether torch compiles and exports what runs inside of it, and not only runs it as written."""
        return True

    def add(self, *observers: Observer, inside: nn.Module | None = None) -> None:
        """Show operators to these, too, from here on; `inside`: the module whose call has just begun."""
        new = [one for one in observers if one not in self._observers]
        if self._is_given_up or not new:
            return
        if not self._observers:
            self._places = self._make_places()
            if inside is not None:
                self._places.enter(inside)
        self._observers += new
        if threading.get_ident() not in self._threads:
            self._threads[threading.get_ident()] = torch.is_inference_mode_enabled()
            above = _get_current_dispatch_mode_stack()
            with _disable_current_modes():  # below them: a script leaves its own by taking the uppermost
                self.__enter__()
            _has_below(self, False)
            _has_below(above[0], True) if above else None

    def remove(self, *observers: Observer) -> None:
        """Show nothing more to these."""
        self._observers = [one for one in self._observers if one not in observers]
        if not self._observers and self._places is not None:
            self._places.close()
            self._places = None
            self.leave()

    def give_up(self) -> None:
        """Show nothing more to anyone."""
        self._is_given_up = True
        self.remove(*self._observers)

    def leave(self) -> None:
        """Take the mode away where nobody observes, also from below others."""
        thread, stack = threading.get_ident(), _get_current_dispatch_mode_stack()
        if (self._observers and self._applies()) or thread not in self._threads or self not in stack:
            return
        if self._threads[thread] or not torch.is_inference_mode_enabled():
            del self._threads[thread]
            above = [_pop_mode() for _ in stack[stack.index(self) + 1 :]]
            _has_below(self, bool(above))
            self.__exit__(None, None, None)
            for mode in reversed(above):
                _push_mode(mode)
            _has_below(above[-1], False) if above else None

    @property
    def module(self) -> str | None:
        """The path of the innermost module that is running; None outside of all."""
        return None if self._places is None else self._places.module

    @contextmanager
    def shown_to(self, *observers: Observer) -> Iterator[None]:
        """Show operators to these inside."""
        self.add(*observers)
        try:
            yield
        finally:
            self.remove(*observers)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is neither the script's nor its model's."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        places = self._places  # another thread may take them away
        if self.is_paused or places is None or is_traced() or not self._applies():
            return func(*args, **kwargs)
        shown = [one for one in self._observers if one.wants(func, args, kwargs)]
        call = None
        with self._clock:
            if shown:
                written = written_by(func, args, kwargs)
                place = places.place(any(t._is_view() for t in written))
                shown = [one for one in shown if one.everywhere or place.direction == "forward"]
                given = [*tensors(args), *tensors(kwargs)]
                made = Call(func, tuple(args), dict(kwargs), place, written, torch.is_grad_enabled(), given)
                with torch.no_grad():
                    for one in shown:
                        one.before(made)
                call = made
        if call is None:
            return func(*args, **kwargs)
        try:
            call.out = out = func(*args, **kwargs)
        except Exception as error:
            for one in shown:
                one.failed(error)
            raise
        with self._clock, torch.no_grad():
            for one in shown:
                one.after(call)
        return out


def _has_below(mode: TorchDispatchMode, there: bool) -> None:
    """Tell a mode whether there are others below it: torch's compiler asks, and is told that again when it leaves."""
    for name, before in vars(mode).items():
        if name.startswith("old_") and before:
            before[-1] = there


@dataclass(slots=True)
class Product:
    """All products of one kind that one module computed: FLOPs, and the dimensions that a wider layer would change."""

    module: str | None
    op: str
    dtype: torch.dtype
    dims: Dims
    at: Line
    flops: float = 0.0


class Products(Observer):
    """Counts the FLOPs of matrix products and convolutions, 2 for each multiplication and addition."""

    def __init__(self) -> None:
        self._by_kind: dict[Any, Product] = {}

    def after(self, call: Call) -> None:
        """Count one product."""
        measured = _measure(call)
        if measured is None:
            return
        flops, dtype, dims = measured
        key = (call.place.module, call.base, dtype, dims)
        if key not in self._by_kind:
            self._by_kind[key] = Product(call.place.module, call.base, dtype, dims, call.place.at)
        self._by_kind[key].flops += flops

    @property
    def all(self) -> list[Product]:
        """One of each kind."""
        return list(self._by_kind.values())

    @property
    def low(self) -> list[Product]:
        """Products that ran in 16 bits."""
        return [product for product in self.all if product.dtype in LOW_DTYPES]

    @property
    def flops(self) -> float:
        """FLOPs of the whole run."""
        return sum(product.flops for product in self.all)

    @property
    def low_share(self) -> float | None:
        """Share of the FLOPs that ran in 16 bits; None when there were none."""
        return sum(product.flops for product in self.low) / self.flops if self.flops else None


def _measure(call: Call) -> tuple[float, torch.dtype, Dims] | None:
    args, base = call.args, call.base
    if base in ("mm", "bmm", "addmm", "baddbmm", "_addmm_activation"):
        left, right = args[:2] if base in ("mm", "bmm") else args[1:3]
        inner, columns = right.shape[-2:]
        # The rows are the batch, which says nothing here: an example is often smaller than a training batch.
        return 2.0 * left.numel() * columns, left.dtype, (("inner", inner), ("columns", columns))
    if base in ("convolution", "_convolution", "mkldnn_convolution", "cudnn_convolution"):
        given, weight, transposed = args[0], args[1], base == "convolution" and bool(args[6])
        places = given if transposed else call.out
        first, second = ("in", "out") if transposed else ("out", "in")
        dims = ((f"{first}_channels", weight.shape[0]), (f"{second}_channels", weight.shape[1]))
        return 2.0 * weight.numel() * places.shape[0] * math.prod(places.shape[2:]), given.dtype, dims
    if base in ("mkldnn_rnn_layer", "_cudnn_rnn"):  # a whole layer, or several: every weight meets every position
        given, weights = args[0], [w for w in (args[1:3] if base == "mkldnn_rnn_layer" else args[1]) if w.dim() == 2]
        dims = (("input_size", weights[0].shape[1]), ("hidden_size", weights[1].shape[1]))
        return 2.0 * given.numel() // given.shape[-1] * sum(w.numel() for w in weights), given.dtype, dims
    if base.startswith("_scaled_dot_product") and isinstance(args[0], Tensor) and "backward" not in base:
        query, key, value = args[:3]
        flops = 2.0 * query.numel() * key.shape[-2] + 2.0 * math.prod(query.shape[:-1]) * value.shape[-2:].numel()
        return flops, query.dtype, (("head size", query.shape[-1]),)
    return None


def dimensions(product: Product, module: nn.Module | None) -> Dims:
    """What decides whether a product fills tensor cores, in the words of the module that computes it.

    Empty for grouped and depthwise convolutions, which do not run on tensor cores by channel.
    """
    if isinstance(module, nn.modules.conv._ConvNd) and module.groups > 1:
        return ()
    if not isinstance(module, nn.Linear):
        return product.dims
    names = {"inner": "in_features", "columns": "out_features"}
    known = {module.in_features, module.out_features}
    if not {size for _, size in product.dims} <= known:
        return product.dims
    return tuple((names.get(name, name), size) for name, size in product.dims)
