"""Changes that 16 bits take in whole: the value stays, and in float32 it would have moved.

A change in place, or a new tensor that takes the place of the one that it was made of: `total = total + x`.
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from ...formats import LOW_DTYPES, name_of
from ...tree import map_tensors, tensors
from ..measure import key_of
from ..operators import Call, Observer, base_of
from ..places import Place, written_by
from ..records import Line
from ..statements import Statement, dotted, parsed, statement_at
from .facts import Absorbed
from .values import relative_error

MOVES = frozenset({"add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "copy"})
"""Operators by which a number goes on from what it was, or gets what was computed from it in more bits."""
SUMS = frozenset({"add", "sub", "mul", "lerp"})
"""Those that may make a new sum or average of the old one."""
SOURCES = 4
"""Tensors of which a new one was made that are remembered: a long sum is made of many."""
MOMENTS = ("exp_avg_sq", "square_avg")
"""Names under which torch's optimizers and their kin keep second moments."""


class Changes(Observer):
    """Does every change in place again in float32, and counts what moves there and not here."""

    everywhere = True

    def __init__(self) -> None:
        self._lines: dict[Any, Absorbed] = {}
        self._kept: list[tuple[Tensor, Tensor, Tensor]] | None = None
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}
        """By storage, gradients that autograd adds to, and their sums in float32."""
        self._errors: dict[int, float] = {}
        """Their relative errors, once the sums are whole."""
        self._moments: dict[int, int] = {}
        """Storages of the second moments that a step is to move, and of the weights that they belong to."""
        self._moving: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        """By storage, those that this step has moved so far, what they were before it, and what they are in float32."""
        self._new: dict[int, tuple[StorageWeakRef, dict[int, tuple[Absorbed, ...]]]] = {}
        """By storage, new tensors that may be sums: the storages each was made of, with the counts on the way."""
        self._optimizer: Optimizer | None = None
        """What steps now."""
        self._weights: set[int] = set()
        """Storages of what it steps, and of new tensors made of them."""
        self._owned: frozenset[int] = frozenset()
        """Storages that it keeps: copies of masters lose nothing that the masters have not."""

    def steps(self, optimizer: Optimizer | None) -> None:
        """An optimizer begins to step; None: it has stepped."""
        self._count_moments()
        self._optimizer = optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        self._weights = {key_of(p) for group in groups for p in group["params"]}
        kept = [] if optimizer is None else list(tensors((groups, list(optimizer.state.values()))))
        self._owned = frozenset(map(key_of, kept))
        self._moments = {} if optimizer is None else dict(_moments_of(optimizer))
        for key, (gradient, exact) in self._sums.items() if optimizer is not None else ():
            self._errors[key] = relative_error(gradient, exact)
        self._sums.clear()

    def _count_moments(self) -> None:
        """A step is over: which of its second moments moved, all operators of the step together."""
        key = MOMENTS, id(self._optimizer)
        nowhere = Place(None, None, None, "forward")
        for storage, (tensor, before, exact) in self._moving.items():
            new = Absorbed(MOMENTS[0], name_of(tensor.dtype), nowhere, self._optimizer, is_moment=True)
            moves = exact != before
            self._lines.setdefault(key, new).add(
                self._moments[storage], int(moves.sum()), int((moves & (tensor == before)).sum())
            )
        self._moving.clear()

    def wants(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operator moves float16 or bfloat16 numbers: in place, or in a step by making new ones of them."""
        base = base_of(func)
        name = base.removeprefix("_foreach_").rstrip("_")
        if name not in MOVES and not base.startswith("_fused_"):
            return False
        written = written_by(func, args, kwargs)
        if not written and args and isinstance(args[0], Tensor):
            return args[0].dtype in LOW_DTYPES and (self._optimizer is not None or _may_be_a_sum(name, args[0]))
        return any(t.dtype in LOW_DTYPES for t in written)

    def before(self, call: Call) -> None:
        """Keep what is about to move, and move it in float32."""
        self._kept = None
        if call.place.ours:
            return
        if call.base == "copy" and self._optimizer is None and not self._is_put_back(*call.args[:2]):
            return
        if call.base == "copy" and key_of(call.args[1]) in self._owned:
            return
        given = call.written or [t for t in call.args[: 2 if call.base == "add" else 1] if isinstance(t, Tensor)]
        low = [t for t in given if t.dtype in LOW_DTYPES and t.layout is torch.strided]
        wide: dict[int, Tensor] = {}

        def widened(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            return wide.setdefault(id(tensor), tensor.detach().to(torch.float32, copy=True))

        try:
            args = [map_tensors(widened, value) for value in call.args]
            out = call.func(*args, **{name: map_tensors(widened, value) for name, value in call.kwargs.items()})
        except Exception:
            return
        exact = [wide[id(t)] for t in low] if call.written else [*tensors(out)][:1] * len(low)
        self._kept = [(t, t.detach().clone(), moved) for t, moved in zip(low, exact, strict=False)]

    def after(self, call: Call) -> None:
        """Count what moved."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        node = torch._C._current_autograd_node()
        stepping = None if self._optimizer is None else id(self._optimizer)
        gradient = node is not None and node.name() == "torch::autograd::AccumulateGrad"
        for position, (given, old, exact) in enumerate(kept):
            tensor = given if call.written else next(tensors(call.out))
            moves, storage = exact != old, key_of(tensor)
            in_place = bool(call.written) or self._optimizer is not None
            if tensor.shape != old.shape or tensor.dtype != old.dtype:
                self._made(tensor, given, None)
                continue
            if gradient:
                added = exact - old.to(torch.float32)
                self._sums[storage] = tensor, self._sums[storage][1] + added if storage in self._sums else exact
            if storage in self._moments:
                _, first, so_far = self._moving.get(storage, (tensor, old, old.to(torch.float32)))
                self._moving[storage] = tensor, first, so_far + (exact - old.to(torch.float32))
            weight = key_of(given) in self._weights
            if weight:
                self._weights.add(storage)
            operand = 0 if call.written else position
            key = (call.place.file, call.place.line, call.base, operand, gradient, weight, stepping, in_place)
            name = call.base.removeprefix("_foreach_").rstrip("_")
            new = Absorbed(name, name_of(tensor.dtype), call.place, self._optimizer, gradient, weight)
            new.goes_on = in_place
            count = self._lines.setdefault(key, new)
            count.add(storage, int(moves.sum()), int((moves & (tensor == old)).sum()))
            by = call.args[1] if len(call.args) > 1 else None
            if not in_place:
                count.goes_on |= call.place.module is None and isinstance(by, Tensor) and _replaces(call.place.at)
                self._made(tensor, given, count)
            scalar = isinstance(by, (int, float)) or (isinstance(by, Tensor) and by.dim() == 0)
            count.by = float(by) if scalar and by is not None else None
            count.adds_tensor = isinstance(by, Tensor)
            count.last = weakref.ref(tensor)

    def _made_of(self, tensor: Tensor) -> dict[int, tuple[Absorbed, ...]]:
        """The storages that a tensor was made of, its own for others, with the counts on the way."""
        held, sources = self._new.get(key_of(tensor), (None, {}))
        return sources if held is not None and not held.expired() else {key_of(tensor): ()}

    def _made(self, tensor: Tensor, given: Tensor, count: Absorbed | None) -> None:
        """A new tensor was made of another one; one number that the same line made as well, in a loop, is a sum.

        Of more than one number it may be a model's, to which each block adds what it computes.
        """
        held, sources = self._new.get(key_of(tensor), (None, {}))
        sources = {} if held is None or held.expired() else dict(sources)
        for source, counts in self._made_of(given).items():
            if count is not None and count in counts and count.moved <= count.times:
                count.goes_on = True
            sources[source] = counts if count is None or count in counts else (*counts, count)
        first = dict(islice(sources.items(), SOURCES))
        self._new[key_of(tensor)] = StorageWeakRef(tensor.untyped_storage()), first

    def _is_put_back(self, into: Tensor, tensor: Tensor) -> bool:
        """Whether a tensor that was made of another one is copied into that: then it takes its place.

        False if the counts on the way say all, since nothing is rounded here.
        """
        sources = self._made_of(tensor)
        for count in sources.get(key_of(into), ()):
            count.goes_on = True
            count.storages.setdefault(key_of(into), (0, 0))
        return key_of(into) in sources and tensor.dtype is not into.dtype

    def events(self) -> Iterator[Absorbed]:
        """One for each line that changed anything."""
        for one in self._lines.values():
            if one.moved:
                one.error = max((self._errors.get(key, 0.0) for key in one.storages), default=0.0)
                yield one


def _may_be_a_sum(name: str, tensor: Tensor) -> bool:
    """Whether an operator outside of graphs and of backward makes a new number of this one."""
    in_graph = tensor.requires_grad and torch.is_grad_enabled()
    return name in SUMS and not in_graph and torch._C._current_autograd_node() is None


def _replaces(line: Line) -> bool:
    """Whether what a training loop assigns takes the place of what it reads: `e = {k: e[k] + x[k] for ...}`."""
    statement, number = statement_at(line), line[1] or 0
    if statement is None or not isinstance(statement.node, ast.Assign):
        return False
    target = statement.node.targets[0]
    while isinstance(target, ast.Subscript):
        target = target.value
    name, within = dotted(target) or "", ast.walk(parsed(statement.file) or statement.node)
    loops = [n for n in within if isinstance(n, (ast.For, ast.While)) and n.lineno <= number <= (n.end_lineno or 0)]
    # `x = x + block(x)`, in a function or a loop over blocks, begins anew with each call
    lasts = "." in name or (bool(loops) and Statement(loops[-1], ()).goes_back)
    return lasts and any(read.partition("[")[0] == name for read in statement.reads())


def _moments_of(optimizer: Optimizer) -> Iterator[tuple[int, int]]:
    """Storages of 16-bit second moments and of their weights."""
    for parameter, state in optimizer.state.items():
        for name in MOMENTS if isinstance(state, dict) else ():
            moment = state.get(name)
            if isinstance(moment, Tensor) and moment.dtype in LOW_DTYPES:
                yield key_of(moment), key_of(parameter)
