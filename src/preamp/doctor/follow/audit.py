"""The operators of one step of a running script, in the dtypes in which they really run.

Nothing is changed and nothing is run twice.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch
from torch import nn

from ..findings import one_of_each
from ..findings.events import RanInThread, Recomputed
from ..handled import Handled
from ..measure import key_of
from ..names import Names
from ..operators import Observer, Products
from ..places import users_line
from ..records import NOWHERE
from ..shadow.absorbed import Changes
from ..shadow.execution import Shadowed
from ..shadow.facts import Absorbed, GradientSpread
from .precision import regions_entered
from .run import Run
from .scales import is_well_known


class Regions:
    """Follows the autocast region in which each module runs: forward, in other threads, and when it is recomputed."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self.entered: tuple[str, ...] = ()
        """Device types for which autocast is on where the model was called."""
        self._thread = threading.get_ident()
        self._first: dict[nn.Module, tuple[torch.dtype, ...]] = {}
        self._outermost: list[Recomputed | RanInThread] = []
        self._hook: Any = nn.modules.module.register_module_forward_pre_hook(self._enter)

    def close(self) -> list[Recomputed | RanInThread]:
        """Let go of torch's global hook; gives the outermost modules that ran otherwise."""
        self._hook.remove()
        return self._outermost

    def _enter(self, module: nn.Module, _: Any) -> None:
        now, path = tuple(torch.get_autocast_dtype(kind) for kind in regions_entered()), self._names.known(module)
        if path is None or any(f"{path}.".startswith(f"{outer.module}.") for outer in self._outermost):
            return
        if torch._C._current_autograd_node() is None:
            self._first.setdefault(module, now)
            if self.entered and not now and threading.get_ident() != self._thread:
                self._outermost.append(RanInThread(path))
        elif self._first.get(module, now) != now:
            self._outermost.append(Recomputed(path, self._first[module], now, users_line()))


class Look:
    """All observers of one step that is looked at operator by operator."""

    def __init__(self, run: Run, handled: Handled, shadowed: Shadowed, *, replayed: bool = False) -> None:
        self.products, self.handled, self.shadowed = Products(), handled, shadowed
        self.finders: list[Observer] = one_of_each(Observer)
        self.observers = [*self.finders, self.products, self.handled, self.shadowed]
        self.replayed = replayed
        """Whether it is one of a replay, which has no lines of the script's inside of its models."""
        self.regions = Regions(run.names)
        self.exact: dict[int, GradientSpread] = {}
        """What float16 lost of each gradient, by the parameter's id, as far as shadows show it."""
        self.parameters: dict[str, int] = {}
        """Numbers of the parameters by dtype, when the gradients arrived."""

    def close(self, run: Run) -> None:
        """Show operators to its observers no more."""
        run.stream.remove(*self.observers)
        for event in self.regions.close():
            run.emit(event)


def emit_changes(changes: Changes, run: Run, step: int) -> None:
    """Tell what was seen to change in a step: of which parameters and buffers, and by which optimizer."""
    for event in changes.events():
        _find_owners(event, run)
        event.step = step
        if event.goes_on or event.buffer is not None:  # what a buffer is now was made of what it was
            run.emit(event)
            if event.counts and event.optimizer is None:
                run.counters[event.at] = event


def _find_owners(event: Absorbed, run: Run) -> None:
    names = run.names
    held = {id(p): p for _, part in names.items() for p in part._parameters.values() if p is not None}
    event.parameters = parameters = [p for p in held.values() if key_of(p) in event.storages]
    counts = {id(p): event.storages[key_of(p)] for p in parameters}
    stuck = [p for p in parameters if 2 * counts[id(p)][1] >= counts[id(p)][0]]
    event.module = names.common(stuck or parameters) if parameters else event.place.module
    for path, part in () if parameters else names.items():
        for name, tensor in part._buffers.items():
            if tensor is not None and key_of(tensor) in event.storages:
                event.module, event.buffer = path, name
    optimizer = event.optimizer
    if optimizer is not None and (event.is_moment or is_well_known(optimizer)):
        event.made_at = run.optimizers.get(optimizer, NOWHERE)
    if optimizer is None and not event.is_gradient:
        stepped = [p for one in run.optimizers for group in one.param_groups for p in group["params"]]
        event.is_weight = any(p is event.last() or key_of(p) in event.storages for p in stepped)
    if event.is_gradient:
        event.made_at = run.backward_at


def dtypes_of(names: Names) -> dict[str, int]:
    """How many numbers of the parameters have each dtype."""
    found: Counter[str] = Counter()
    for parameter in names.parameters():
        found[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return dict(found)
