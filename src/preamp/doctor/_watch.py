"""Follows a training script from outside: its model calls, backward passes, and attempts to step.

A step begins with the first call of a model under autograd and ends with an attempt to step an optimizer, taken or
skipped. After each backward pass loss and gradients are looked at, before anything can be done with them.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..autocast._registry import MARKER
from ..gradients import read
from ..report import Finding
from ..tree import tensors
from ._asked import Asked
from ._live import Live
from ._names import Names, is_trainable, unwrapped
from ._patches import Patches, Place, users_place
from ._places import key_of
from ._raised import finding_of
from ._records import Recorder
from ._replay import diagnose
from ._scaling import Scaling
from ._state import before_first_step
from ._tape import Tape
from ._updates import Updates, flushed

DIAGNOSES = 8
"""Sick steps that are replayed; the first ones tell."""


class Watch:
    """One process under observation. `start` begins, `end` takes everything back and writes the last record."""

    def __init__(self, recorder: Recorder, base: Path, every: int, steps: int | None, replay: bool) -> None:
        self._recorder, self._base = recorder, base
        self._every, self._limit, self._replay = every, steps, replay
        self._patches = Patches()
        self.names, self._tape = Names(), Tape()
        self.scaling, self._asked, self._updates = Scaling(self), Asked(self), Updates(self)
        self.optimizers: dict[int, Optimizer] = {}
        self.places: dict[int, Place] = {}
        """Where each optimizer was made."""
        self._attempts: dict[int, int] = {}
        self._live: Live | None = None
        self._hook: Any = None
        self._inside = self._in_backward = self._in_attempt = False
        self._told: set[Any] = set()
        self._diagnoses = 0
        self._damaged = False
        self._bad: str | None = None
        self._loss: float | None = None
        self._backward_at: Place = (None, None)
        self.stepped_at: Place = (None, None)
        self.scaled_by_hand = False
        """Whether the script multiplied a loss by a scale of its own."""
        self._awaits_attempt = False
        self._saw_step = False
        self._low: set[torch.dtype] = set()
        self._spent, self._began = 0.0, time.perf_counter()

    def start(self) -> None:
        """Have torch tell of model calls, backward passes and steps."""
        import torch.optim.optimizer as base

        wrap = self._patches.wrap
        wrap(torch.autograd, "backward", self._backward)
        wrap(Optimizer, "__init__", self._made_optimizer)
        for hook in (
            base.register_optimizer_step_pre_hook(self._before_step),
            base.register_optimizer_step_post_hook(self._after_step),
        ):
            self._patches.on_close(hook.remove)
        self.scaling.start(self._patches)
        self._asked.start(self._patches)
        wrap(sys, "excepthook", self._raised)
        warnings.filterwarnings("ignore", message="Using `torch.compile", category=UserWarning)
        self._listen()

    def end(self) -> None:
        """The script is over."""
        if not self._recorder.is_own:
            return
        if self._awaits_attempt:
            self._attempted(None, skipped=True)
        self._patches.close()
        if self._hook is not None:
            self._hook.remove()
        self._stop_looking()
        self._tape.clear()
        if self._attempts:
            seconds = time.perf_counter() - self._began
            self._recorder.write("end", spent=self._spent, seconds=seconds, **self.scaling.counts())

    @property
    def step(self) -> int:
        """Attempts so far, of the optimizer that made most."""
        return max(self._attempts.values(), default=0)

    def tell(self, finding: Finding) -> None:
        """Record a finding, once for each place."""
        file = finding.file and os.path.abspath(finding.file)
        if file is not None:
            below = os.path.relpath(file, self._base)
            file = file if below.startswith("..") else below
        finding = replace(finding, file=file, step=self.step if finding.step is None else finding.step)
        key = (finding.code, finding.module, finding.op, finding.file, finding.line)
        if key not in self._told:
            self._told.add(key)
            self._recorder.finding(finding)

    @contextmanager
    def _own_time(self) -> Any:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._spent += time.perf_counter() - begun

    # -- model calls --------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._hook is None:
            self._hook = nn.modules.module.register_module_forward_pre_hook(self._enter)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._inside or self._in_backward or not torch.is_grad_enabled() or not self._recorder.is_own:
            return
        if not is_trainable(module):
            return
        kwargs = sys._getframe(1).f_locals.get("kwargs", {})
        with self._own_time():
            self._hook.remove()  # what the model calls inside runs as if nobody looked
            self._hook, self._inside = None, True
            if self._awaits_attempt and self._bad and self.scaling.active:
                self._attempted(None, skipped=True)  # a scaler that takes the optimizer's step away
            self.names.get(module)
            self.scaling.look_for_apex()
            self._asked.model_called(sum(p._version for p in self.names.parameters()))
            call = self._tape.enter_model(unwrapped(module), args, kwargs, ("cpu", "cuda", MARKER))
            if self._live is None and self._samples():
                self._live = Live(self.names, {id(p): p for p in self.names.parameters()})
                self._live.__enter__()
            if self._live is not None:
                self._live.autocast_on = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda", MARKER))
                self._live.torchs_own = self._live.autocast_on and not torch.is_autocast_enabled(MARKER)

        def left(_: nn.Module, __: Any, out: Any) -> None:
            after.remove()
            self._inside = False
            self._listen()
            if out is not None:
                self._tape.leave_model(call, out, self._asked.compiled != "function")

        after = module.register_forward_hook(left, always_call=True)

    def _samples(self) -> bool:
        """Whether this step is looked at operator by operator: the first, and then more and more rarely."""
        if self._asked.compiled:
            return False  # compiled code would run as written under the observation, with other roundings
        step = self.step
        return step == 0 or (step % self._every == 0 and (step // self._every).bit_count() == 1)

    def _close_look(self) -> None:
        """The step is whole: nothing more is kept of it, and what was seen is judged."""
        self._tape.close_window()
        sampled = self._live is not None
        self._stop_looking()
        finding = self.scaling.unscaled_backward(self._backward_at, self._low)
        if finding is not None:
            self.tell(finding)
        if sampled and torch.float16 in self._low and not self._bad:
            for each in flushed(self, self.scaling.scale_now()):
                self.tell(each)

    def _stop_looking(self) -> None:
        live, self._live = self._live, None
        if live is None:
            return
        live.stop()
        if live.reads:
            self.tell(_read_while_scaled(live.reads[0], self.scaling.scale or 1.0))
        for finding in live.findings():
            self.tell(finding)
        self._low |= live.low
        for finding in self._asked.findings(live):
            self.tell(finding)
        dtypes = {path: dict(counts) for path, counts in live.dtypes.items()}
        products = live.products
        self._recorder.write(
            "audit", step=self.step, outputs=dtypes, flops=products.total, low_share=products.low_share,
            parameters=_dtypes(self.names.parameters()),
        )  # fmt: skip

    # -- backward passes ----------------------------------------------------------------------------------------

    def _backward(self, original: Any, tensors_: Any, *args: Any, **kwargs: Any) -> Any:
        if self._in_backward or self._inside or not self._recorder.is_own:
            return original(tensors_, *args, **kwargs)
        losses = list(tensors(tensors_))
        with self._own_time():
            self._tape.close_window()
            place = users_place()
            self._note_loss(losses, place)
        self._in_backward = True
        try:
            out = original(tensors_, *args, **kwargs)
        finally:
            self._in_backward = False
        with self._own_time():
            self._awaits_attempt, self._saw_step = True, False
            self.scaling.after_backward(losses)
            self.scaled_by_hand |= any(self._tape.scaled_by_hand(loss) for loss in losses)
            self._look_at(losses)
            if self._live is not None and self.scaling.scale_now() != 1:
                grads = (p.grad for p in self.names.parameters() if p.grad is not None)
                self._live.grad_keys = frozenset(key_of(grad) for grad in grads)
        return out

    def _note_loss(self, losses: list[Tensor], place: Place) -> None:
        if losses and losses[0].numel() == 1:
            self._loss = float(losses[0].detach()) / self.scaling.scale_of(losses[0])
        self._backward_at = place

    def _look_at(self, losses: list[Tensor]) -> None:
        """Whether this backward pass was sound; a sick one is done again to see why."""
        sick_loss = any(not bool(torch.isfinite(loss).all()) for loss in losses)
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        sick = sick_loss or (bool(gradients) and not _finite(gradients))
        if not sick or self._damaged:
            return
        self._bad = "loss" if sick_loss else "gradients"
        if not self._replay or self._diagnoses >= DIAGNOSES:
            return
        self._diagnoses += 1
        scale = self.scaling.scale_of(losses[0]) if len(losses) == 1 else 1.0
        self._inside = True  # the models that are called now are called by us
        try:
            found = diagnose(self._tape, self.names, losses, scale, self._parameters())
        finally:
            self._inside = False
        if found is None:
            self._recorder.write("unexplained", step=self.step, what=self._bad)
            return
        if found.by_scale:
            self._recorder.write("overflow", step=self.step, scale=scale, **found.place())
        else:
            self.tell(found.finding(self.step))

    def _parameters(self) -> list[Tensor]:
        known = {
            id(p): p for optimizer in self.optimizers.values() for g in optimizer.param_groups for p in g["params"]
        }
        known.update({id(p): p for p in self.names.parameters()})
        return list(known.values())

    # -- steps --------------------------------------------------------------------------------------------------

    def _made_optimizer(self, original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self.places.setdefault(id(optimizer), users_place())
        original(optimizer, *args, **kwargs)
        self.optimizers[id(optimizer)] = optimizer

    def gradients_are_true(self) -> None:
        """They have been unscaled, or are about to be: who reads them now reads what he means."""
        if self._live is not None:
            self._live.grad_keys = frozenset()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not self._recorder.is_own:
            return None
        closure = kwargs.get("closure") or next((one for one in args[1:] if callable(one)), None)
        if closure is None:
            self._about_to_step(optimizer)
            return None

        def watched() -> Any:  # a closure makes the gradients of the step inside of it
            out = closure()
            self._about_to_step(optimizer)
            return out

        swap = {id(closure): watched}
        named = {name: swap.get(id(value), value) for name, value in kwargs.items()}
        return tuple(swap.get(id(value), value) for value in args), named

    def _about_to_step(self, optimizer: Optimizer) -> None:
        if not self._awaits_attempt:
            return
        with self._own_time():
            self._close_look()
            if not self._attempts.get(id(optimizer)):
                self.names.look(self.optimizers.values())
                for finding in before_first_step(self, optimizer):
                    self.tell(finding)
            self.stepped_at = users_place()
            self.scaling.before_step(optimizer, self.stepped_at)
            if self.step % self._every == 0:
                self._updates.before(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._recorder.is_own or not self._awaits_attempt:
            return
        self._saw_step = True
        with self._own_time():
            for finding in self._updates.after(optimizer):
                self.tell(finding)
        if not self._in_attempt:
            self._attempted(optimizer, skipped=bool(self._bad) and self.scaling.active)

    def attempt(self, original: Any, optimizer: Optimizer) -> Any:
        """A step by way of a scaler: `original()` takes it or skips it."""
        self._close_look()
        self._in_attempt, self._saw_step = True, False
        try:
            return original()
        finally:
            self._in_attempt = False
            self._attempted(optimizer, skipped=not self._saw_step or bool(self._bad))

    def _attempted(self, optimizer: Optimizer | None, skipped: bool) -> None:
        if not self._recorder.is_own:
            return
        optimizer = optimizer or next(iter(self.optimizers.values()), None)
        step = self._attempts.get(id(optimizer), 0)
        self._recorder.write(
            "step", step=step, loss=self._loss, scale=self.scaling.scale, skipped=skipped, bad=self._bad,
            seconds=time.perf_counter() - self._began, **self.scaling.since_last(),
        )  # fmt: skip
        self._attempts[id(optimizer)] = step + 1
        if self._bad and not skipped:
            self._damaged = True  # what follows is sick whatever it does
        self._awaits_attempt, self._bad = False, None
        self._tape.clear()
        if self._limit is not None and self.step >= self._limit:
            self._recorder.write("limit", steps=self._limit)
            raise SystemExit(0)

    def _raised(self, original: Any, kind: Any, error: Any, trace: Any) -> None:
        if self._recorder.is_own:
            self._recorder.write("raised", type=getattr(kind, "__name__", str(kind)), text=str(error)[:2000])
            found = finding_of(error, trace)
            if found is not None:
                self.tell(found)
        original(kind, error, trace)


def _read_while_scaled(place: Any, scale: float) -> Finding:
    return Finding(
        "PA106", "info",
        f"gradients are read, or changed, while they are still {scale:g} times too large",
        file=place.file, line=place.line, evidence={"scale": scale},
        fix="scaler.unscale_(optimizer)  # once, before this line",
    )  # fmt: skip


def _finite(gradients: list[Tensor]) -> bool:
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    return not any(bool(read(group).found) for group in by_device.values())


def _dtypes(parameters: list[Any]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for parameter in parameters:
        name = str(parameter.dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + parameter.numel()
    return counts
