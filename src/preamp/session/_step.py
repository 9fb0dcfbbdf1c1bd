"""Steps of optimizers, taken or skipped, by as few host syncs as the optimizer allows."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, reduce, wraps
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import SessionError
from ..formats import LOW_DTYPES
from ..frameworks import framework_hooks, replaced, tell_skipped, unwrap
from ..kernels import Reading, present_in
from ..ledger import Gradients, Masters, Record, cast_states, parameters_of
from ..modules import Conversion
from ..optim import FusedOptimizer
from ..sharding import held_here
from ._checks import check_own_step, check_step_of_another
from ._losses import Losses, PendingScales
from ._others import OtherLeaves
from ._regions import FullPrecision

Check = Callable[[Sequence[Parameter]], None]
"""Checks the parameters with gradients that are about to be stepped."""

Taken = tuple[list[Parameter], Reading, Callable[[], Tensor], bool | None]
"""The parameters that had gradients, what was read of these, what gives their true norm, and whether an optimizer
skipped (None: only the device knows)."""

SKIPS = ("auto", "host", "device")
"""The values of `skip`: who decides whether an optimizer that takes no flag steps."""


class OptimizerSteps:
    """Steps a session's optimizers, and handles steps and loads of their state by others."""

    def __init__(
        self, optimizers: Sequence[Optimizer], gradients: Gradients, masters: Masters, losses: Losses,
        pending: PendingScales, full: FullPrecision, conversions: Sequence[Conversion], skip: str,
    ) -> None:  # fmt: skip
        self.others = OtherLeaves(optimizers, conversions, losses.separate_scales)
        self.optimizers = list(optimizers)
        self._gradients, self._masters = gradients, masters
        self._losses, self._pending, self._full = losses, pending, full
        self.skip = skip
        self.wrappers: dict[Optimizer, Any] = {}
        """What a framework returned for optimizers, where it is another object."""
        self.loads = 0
        """How often states were loaded, which are in new tensors then."""
        self._undo = ExitStack()
        for each in self.optimizers:
            if isinstance(each, FusedOptimizer):
                each.lend(masters)
            else:
                cast_states(each, masters.recast)
            if not hasattr(each, "_optimizer_load_state_dict_pre_hooks"):  # of a class that does not call torch's
                Optimizer.__setstate__(each, {"defaults": getattr(each, "defaults", {})})
            self._undo.callback(each.register_load_state_dict_pre_hook(_weak(self._before_load)).remove)
            self._undo.callback(each.register_load_state_dict_post_hook(_weak(self._after_load)).remove)
            for name in modes_of(each):
                self._undo.enter_context(replaced(each, name, self._in_float32(each, name)))
        OPEN.add(self)

    def _in_float32(self, optimizer: Any, name: str) -> Any:
        """Make `optimizer.train`, or another method, find masters in the parameters, which it writes."""
        method = getattr(optimizer, name)
        low = not self._masters.wanted and any(p.dtype in LOW_DTYPES for p in parameters_of(optimizer))

        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            inside = self._full.depth > 0
            same = {group.get("train_mode") for group in optimizer.param_groups} == {name == "train"}
            if low and inside and not same:
                raise SessionError(
                    f"{name}() of {type(optimizer).__name__} inside full_precision(), where parameters are float32 "
                    "and without masters its states are 16-bit: call it outside"
                )
            if same or inside or low:  # trainers call it before each step; or its states are as the parameters are
                return method(*args, **kwargs)
            self._gradients.rest()
            with self._full:
                return method(*args, **kwargs)

        return run

    def follow(self, wrappers: Iterable[Any]) -> None:
        """Have what a framework hands out in the place of optimizers use their own `train` and `eval`."""
        for each in wrappers:
            for name in {"train", "eval"} & vars(unwrap(each)).keys():
                self._undo.enter_context(replaced(each, name, vars(unwrap(each))[name]))

    def read(self, optimizer: Optimizer, steps_next: bool = False) -> Record:
        """Read an optimizer's gradients, once a step (`Gradients.read`)."""
        return self._gradients.read(optimizer, self._losses.shared.inverse, steps_next)

    def take_all(self, chosen: Sequence[Optimizer], check: Check) -> Taken:
        """Step optimizers, each unless its gradients are not finite. `check`: called before the first."""
        # of several not: a hook around the step of one may change the gradients of another after they were copied
        records = [self.read(each, steps_next=len(chosen) == 1) for each in chosen]
        norm = self._gradients.norm_of_all(chosen)
        parameters = list(chain.from_iterable(map(attrgetter("present"), records)))
        check(parameters)
        skipped: list[bool | None] = []
        try:
            for each, record in zip(chosen, records, strict=True):
                skipped.append(self.take(each, record.reading.found))
        except BaseException:
            self._gradients.rest()  # as they were, since the step may be tried again
            raise
        for each, skip in zip(chosen, skipped, strict=True):
            self._gradients.forget(each, stepped=not skip)
        read = reduce(Reading.merged, map(attrgetter("reading"), records))
        return parameters, read, norm, None if None in skipped else any(skipped)

    def take(self, optimizer: Optimizer, found: Tensor) -> bool | None:
        """Step unless `found`; returns whether it skipped, or None when only the device knows."""
        wrapper = self.wrappers.get(optimizer)
        self._gradients.stepping = optimizer
        try:
            if wrapper is None:
                return self._step_unless(found, optimizer)
            with framework_hooks(wrapper):
                skipped = self._step_unless(found, optimizer)
            tell_skipped(wrapper, lambda: found > 0 if skipped is None else skipped)
            return skipped
        finally:
            self._gradients.stepping = None

    def _step_unless(self, found: Tensor, optimizer: Optimizer) -> bool | None:
        """Step or skip.

        Optimizers of `preamp.optim` take low, scaled gradients, a factor and the masters; torch's fused ones take true
        gradients and the flag. Any other steps after the host has read that, or always, and is undone if `found`.
        """
        on_cpu, fused = found.device.type == "cpu", getattr(optimizer, "_step_supports_amp_scaling", False)
        on_device = not fused and (self.skip == "device" or (not on_cpu and not needs_host(optimizer, self.skip)))
        if on_device and not all(map(optimizer.state.get, present_in(list(parameters_of(optimizer)))[0])):
            on_device = False  # states made by this step could not be unmade: the host decides
        skipped = bool(found) if (on_cpu or not fused) and not on_device else None
        flag = None if on_cpu else found
        if skipped:
            return True
        ours = isinstance(optimizer, FusedOptimizer) and fused and not self._losses.separate_scales
        if ours and self._gradients.takes_low(optimizer):
            self._gradients.step_low(optimizer, flag)
            return skipped
        self._gradients.make_true(optimizer)
        if on_device:
            _step_and_put_back(optimizer, found)
        elif fused:
            _step_under_flag(optimizer, flag)
        else:
            optimizer.step()
        return skipped

    def before_own_step(self, optimizer: Optimizer, with_closure: bool) -> None:
        """Refuse a step of the session's optimizer by the caller itself if it would do harm."""
        if self._gradients.stepping is optimizer:
            return
        masters = None if self._full.depth else self._masters  # which are in their places there
        check_own_step(optimizer, masters, self._may_be_scaled(with_closure))
        torch.clear_autocast_cache()  # of a region that is open still: casts of weights as they will not be

    def before_step_of_another(self, optimizer: Optimizer, with_closure: bool) -> None:
        """Refuse the step of an optimizer that the session does not have if it would do harm."""
        if self._gradients.stepping is not None or not (self._losses.scaled or self._masters.wanted):
            return
        scaled: set[Tensor] = self.others.scaled() if self._losses.scaled else set()
        self.others.met = True
        waiting = self._may_be_scaled(with_closure) and not self._losses.separate_scales
        for each in self.optimizers if waiting else ():
            scaled.update(() if self._gradients.is_true(each) else parameters_of(each))
        stepping = [p for p in parameters_of(optimizer) if with_closure or p.grad is not None]  # it makes them inside
        check_step_of_another(type(optimizer).__name__, stepping, self._masters, scaled)

    def _may_be_scaled(self, with_closure: bool) -> bool:
        """Whether gradients are multiplied by the loss scale, or a closure's may be as an optimizer steps them; not in
        full precision, where the session's backward passes are refused after this.
        """
        if self._losses.scaled and self._full.depth:
            self._full.closed_over = self._full.closed_over or with_closure
            return self._full.counts
        return self._losses.scaled and (self._pending.running or with_closure)

    def _before_load(self, optimizer: Optimizer, state: Any) -> None:
        """Torch casts loaded state to the parameters' dtype: let it find float32 masters, not 16-bit parameters."""
        here, there = ([len(g["params"]) for g in groups] for groups in (optimizer.param_groups, state["param_groups"]))
        if here != there or not isinstance(state.get("state"), Mapping):
            return  # torch refuses it, and masters would never be swapped out
        if not self._full.depth:
            self._gradients.rest()
        self._masters.refresh()
        self._loading = [p for p in parameters_of(optimizer) if p not in self._masters.inside]
        self._masters.swap_in(self._loading)

    def _after_load(self, optimizer: Optimizer) -> None:
        self._masters.swap_out(self._loading)
        self.loads += 1

    def close(self) -> None:
        """Release the optimizers; those of `preamp.optim` get their own masters again by `take_states_back`."""
        OPEN.discard(self)
        self._undo.close()

    def take_states_back(self, masters: Mapping[Parameter, Tensor], dtypes: Mapping[Parameter, torch.dtype]) -> None:
        """Call it once `masters` are back in the parameters; an optimizer keeps those of 16-bit ones.

        `dtypes`: what `Masters.restore` returned.
        """
        for each in self.optimizers:
            own = {p: masters[p] for p in parameters_of(each) if p in masters}
            each.lend(None, own) if isinstance(each, FusedOptimizer) else cast_states(each, dtypes)


class _OpenSessions:
    """Asks open sessions before any optimizer of the process steps: theirs, or another.

    One hook serves all sessions. The end of a session that nobody closed does not remove it: the garbage collector may
    run at any line, also while torch iterates over its hooks.
    """

    def __init__(self) -> None:
        self._open: list[weakref.ref[OptimizerSteps]] = []
        self._handle: Any = None

    def __contains__(self, optimizer: Optimizer) -> bool:
        return any(optimizer in steps.optimizers for known in self._open if (steps := known()) is not None)

    def add(self, steps: OptimizerSteps) -> None:
        self._open.append(weakref.ref(steps))
        self._handle = self._handle or register_optimizer_step_pre_hook(self._before_step)

    def discard(self, steps: OptimizerSteps) -> None:
        self._open = [known for known in self._open if known() not in (None, steps)]
        if self._handle is not None and not self._open:
            self._handle.remove()
            self._handle = None

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with_closure = any(map(callable, (*args, *kwargs.values())))
        for known in self._open:
            if (steps := known()) is not None and optimizer in steps.optimizers:  # of one session only
                steps.before_own_step(optimizer, with_closure)
                return
        for known in self._open:
            if (steps := known()) is not None:
                steps.before_step_of_another(optimizer, with_closure)

    _before_step.changes_nothing = True  # type: ignore[attr-defined]


OPEN = _OpenSessions()


def _weak(method: Callable[..., None]) -> Callable[..., None]:
    """A hook for an optimizer that does not keep a session, which its user may have lost, open."""
    known = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (alive := known()) is not None:
            alive(*args)

    return call


def modes_of(optimizer: Optimizer) -> tuple[str, ...]:
    """The methods of an optimizer that exchange weights of training and of evaluation (as schedulefree's do), and its
    own way to load states, which need not call torch's hooks.
    """
    kind, both = type(optimizer), ("train", "eval")
    modes = both if all(callable(getattr(kind, name, None)) for name in both) else ()
    plain = isinstance(optimizer, FusedOptimizer) or kind.load_state_dict is Optimizer.load_state_dict
    return modes if plain else (*modes, "load_state_dict")


def _step_under_flag(optimizer: Any, found: Tensor | None) -> None:
    """Step by torch's own protocol: attributes that a fused step reads."""
    optimizer.grad_scale, optimizer.found_inf = None, found
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def needs_host(optimizer: Optimizer, skip: str) -> bool:
    """Whether, on an accelerator, the host has to decide whether an optimizer steps."""
    capturable = all(group.get("capturable", False) for group in optimizer.param_groups)
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    return not (fused or skip == "device" or (skip == "auto" and capturable))


@cache
def _torchs() -> frozenset[str]:
    """Attributes of every optimizer, and of one that has a scheduler, which a skipped step may change.

    Asked of one only when they are needed, since the first optimizer of a process imports the compiler.
    """
    every = vars(torch.optim.SGD([torch.zeros(1)], 0.1))
    return frozenset({*every, "_opt_called", "_step_count"} - {"state", "param_groups"})


def _all_that_a_step_changes(optimizer: Optimizer) -> dict[tuple[Any, ...], Any]:
    """Tensors and plain values by their place: parameters that step, and whatever the optimizer keeps, however deep."""
    stepping, _ = present_in(list(parameters_of(optimizer)))
    found: dict[tuple[Any, ...], Any] = {("parameter", i): p.detach() for i, p in enumerate(stepping)}
    left: list[tuple[tuple[Any, ...], Any]] = [((), optimizer)]
    seen: set[int] = set()
    while left:
        place, value = left.pop()
        if isinstance(value, (bool, int, float, complex, str, Tensor)):
            found[place] = value
        elif id(value) not in seen and not callable(value) and not isinstance(value, nn.Module):
            seen.add(id(value))
            if isinstance(value, Mapping):
                inner: Any = value.items()
            elif isinstance(value, (list, tuple, deque)):
                inner = enumerate(value)
            else:
                own = getattr(value, "__dict__", {}).items()
                inner = [(k, v) for k, v in own if not (isinstance(value, Optimizer) and k in _torchs())]
            left += [((*place, id(k) if isinstance(k, Tensor) else k), v) for k, v in inner if k != "params"]
    return found


@torch.no_grad()
def _step_and_put_back(optimizer: Optimizer, found: Tensor) -> None:
    """Step, then undo it on the device if `found`. Costs a copy of parameters and states, no host sync."""
    before = {
        place: held_here(value).clone() if isinstance(value, Tensor) else value
        for place, value in _all_that_a_step_changes(optimizer).items()
    }
    optimizer.step()
    after = _all_that_a_step_changes(optimizer)
    for place in before.keys() | after.keys():
        kept, now = before.get(place), after.get(place)
        if isinstance(now, Tensor) and isinstance(kept, Tensor) and held_here(now).shape == kept.shape:
            now = held_here(now)
            now.copy_(torch.where(found.to(now.device) > 0, kept.to(now.device), now))
        elif now is not kept and now != kept:
            where = ".".join(map(str, place))
            raise SessionError(
                f"{type(optimizer).__name__} changes {where} on the host ({kept!r:.40} became {now!r:.40}), which a "
                "skip on the device cannot undo: leave out skip='device', or make the optimizer with capturable=True"
            )
