"""Follows a training script from outside: its model calls, backward passes, and attempts to step.

A step begins with the first call of a model under autograd and ends with an attempt to step an optimizer, taken or
skipped. After each backward pass loss and gradients are looked at, before anything can be done with them.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..autocast import MARKER
from ..report import Finding
from ..tree import tensors
from ._asked import Asked
from ._calls import Calls, telling_closure
from ._clock import Clock
from ._look import Look
from ._names import Names, unwrapped
from ._patches import Patches
from ._raised import Errors
from ._records import Recorder
from ._scaling import Scaling
from ._soundness import Soundness
from ._stack import Line, users_line
from ._state import after_first_step, before_first_step
from ._tape import Tape
from ._updates import Updates


class Watch:
    """One process under observation. `start` begins, `end` takes everything back and writes the last record."""

    def __init__(
        self,
        recorder: Recorder,
        base: Path,
        every: int | None,
        steps: int | None,
        replay: bool,
        names: Names | None = None,
    ) -> None:
        self.recorder, self._base = recorder, base
        self._every, self._limit = every, steps
        self.clock = Clock(self._failed)
        self._patches = Patches()
        self.errors = Errors(recorder, self.tell)
        self.names, self.tape = names or Names(), Tape(self.clock, self.errors.seen)
        self.scaling, self.asked, self._updates = Scaling(self), Asked(self), Updates(self)
        self._look = Look(self, every, replay)
        self.optimizers: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        """By their ids; they and the models are the script's to let go of."""
        self.places: dict[int, Line] = {}
        """Where each optimizer was made."""
        self._attempts: dict[int, int] = {}
        self._most = 0  # of an optimizer that is gone
        self._examined: set[int] = set()
        """Optimizers whose first step was looked at."""
        self._look_at_state: set[int] = set()
        """Those whose state was not, as there was none yet."""
        self.calls = Calls(self)
        self.in_backward = self._in_attempt = self._off = False
        self._told: set[Any] = set()
        self.soundness = Soundness(self, replay)
        self._loss: float | None = None
        self.losses: list[Tensor] = []
        """What went back in this step."""
        self.backward_at: Line = (None, None)
        self.stepped_at: Line = (None, None)
        self.scaled_by_hand = False
        """Whether the script multiplied a loss by a scale of its own."""
        self._awaits_attempt = self._went_back = False
        self._saw_step = False
        self._versions: list[tuple[int, int]] = []
        """Of weights and gradients after a backward pass, where no optimizer is known."""
        self.on_first_gradients: Callable[[float], None] | None = None
        """Called before the first step with the scale that is on the gradients."""

    def start(self) -> None:
        """Have torch tell of model calls, backward passes and steps."""
        import torch.optim.optimizer as base

        wrap = self._patches.wrap
        wrap(torch.autograd, "backward", self._backward)
        wrap(torch.autograd, "grad", self._grad)
        wrap(Optimizer, "__init__", self._made_optimizer)
        for hook in (
            base.register_optimizer_step_pre_hook(self._before_step),
            base.register_optimizer_step_post_hook(self._after_step),
        ):
            self._patches.on_close(hook.remove)
        self.scaling.start(self._patches)
        self.asked.start(self._patches)
        wrap(sys, "excepthook", self.errors.uncaught)
        self._hush("Using `torch.compile")
        self.calls.listen()

    def _hush(self, message: str) -> None:
        """Keep a warning about our hooks from the script's output."""
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
        rule = warnings.filters[0]
        self._patches.on_close(lambda: rule in warnings.filters and warnings.filters.remove(rule))  # type: ignore[attr-defined]

    def end(self) -> None:
        """The script is over."""
        if not self.recorder.is_own:
            return
        if self._awaits_attempt:
            self._attempted(None, skipped=not self._stepped_otherwise)
        self._patches.close()
        self.calls.close()
        self.tape.clear()  # its mode lies above the other's
        self._look.close()
        if self._attempts:
            self.recorder.write("end", spent=self.clock.spent, seconds=self.clock.seconds, **self.scaling.counts())

    @property
    def bad(self) -> str | None:
        """What was not finite in this step, "loss" or "gradients"."""
        return self.soundness.bad

    @property
    def step(self) -> int:
        """Attempts so far, of the optimizer that made most."""
        return max((self._most, *self._attempts.values()))

    @property
    def _turn(self) -> int:
        """Attempts so far, of the optimizer that made fewest: two optimizers take turns, and each is to be looked at.

        One that made next to none while another made many is not used.
        """
        made = [self._attempts.get(key, 0) for key in self.optimizers]
        return min((count for count in made if count * 20 >= self.step - 4), default=self.step)

    def tell(self, finding: Finding) -> None:
        """Record a finding, once for each place; nothing more once looking has come to an end, half way through."""
        if self._off:
            return
        file = finding.file
        if file is not None and not file.startswith("<"):  # a cell of a notebook
            file = os.path.abspath(file)
            below = os.path.relpath(file, self._base)
            file = file if below.startswith("..") else below
        finding = replace(finding, file=file, step=self.step if finding.step is None else finding.step)
        key = (finding.code, finding.severity, finding.module, finding.op, finding.file, finding.line)
        if key not in self._told:
            self._told.add(key)
            self.recorder.finding(finding)

    # -- model calls --------------------------------------------------------------------------------------------

    def model_called(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A model is about to run; what is returned is handed to `model_returned`."""
        if self._awaits_attempt and self._stepped_otherwise:
            self._attempted(None, skipped=False)
        elif self._awaits_attempt and self.bad and self.scaling.active:
            self._attempted(None, skipped=True)  # a scaler that takes the optimizer's step away
        self.names.get(module)
        self.names.is_sharded |= type(module).__name__ == "FullyShardedDataParallel"
        self.scaling.look_for_apex()
        self.asked.model_called({id(p): p._version for p in self.names.parameters()})
        call = self.tape.enter_model(unwrapped(module), args, kwargs, ("cpu", "cuda", MARKER))
        self._look.open(self._turn, module)
        return call

    def model_returned(self, call: Any, out: Any) -> None:
        """What it gave."""
        with self.clock:
            self.tape.leave_model(call, out, self.asked.compiled != "function")

    def _versions_now(self) -> list[tuple[int, int]]:
        parameters = self.names.parameters()
        return [(p._version, -1 if p.grad is None else p.grad._version) for p in parameters]

    @property
    def _stepped_otherwise(self) -> bool:
        """Whether weights or gradients were changed since the backward pass, and by no optimizer of torch's.

        Gradients tell where weights are written through .data, which leaves no trace: they are cleared for the next.
        """
        return not self.optimizers and self._versions != self._versions_now()

    def _close_look(self, optimizer: Optimizer | None) -> None:
        """The step is whole: nothing more is kept of it, and what was seen is judged."""
        self.tape.close_window()
        self.soundness.before_step()
        if self.on_first_gradients is not None:
            self.on_first_gradients(self.scaling.scale_now())
            self.on_first_gradients = None
        self._look.before_step(optimizer)
        finding = self.scaling.unscaled_backward(self.backward_at, self._look.low, self._look.low_now)
        if finding is not None:
            self.tell(finding)

    # -- backward passes ----------------------------------------------------------------------------------------

    def _backward(self, original: Any, tensors_: Any, *args: Any, **kwargs: Any) -> Any:
        if self.in_backward or self.calls.inside or self._off or not self.recorder.is_own:
            return original(tensors_, *args, **kwargs)
        losses = list(tensors(tensors_))
        with self.clock:
            self.tape.close_window()
            place = users_line()
            self._note_loss(losses, place)
            self.losses += losses
            self.scaling.before_backward(losses, self._look.low)
            self._look.before_backward(self.scaling.scale_of(losses[0]) if losses else 1.0, losses)
        self.in_backward = True
        try:
            out = original(tensors_, *args, **kwargs)
        finally:
            self.in_backward = False
        with self.clock, self._look.paused():  # what is done with gradients here is our doing
            self._awaits_attempt, self._saw_step = True, False
            self.scaling.after_backward(losses)
            self.scaled_by_hand |= any(
                not self.scaling.is_scaled(loss) and self.scaling.scale_of(loss) == 1 and self.tape.scaled_by_hand(loss)
                for loss in losses
            )
            self.soundness.look_at(losses)
            self._went_back = True
            if not self.optimizers:  # the script, or a library, steps by other means: nobody will tell when
                self._close_look(None)
                self._versions = self._versions_now()
            self._look.after_backward(self.scaling.scale_now() != 1)
            if self.tape.is_long and not self.bad and not kwargs.get("retain_graph"):
                self.tape.clear()  # of a long accumulation: the inputs of sound micro-batches are the script's memory
        return out

    def _grad(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Gradients as a part of the loss: a penalty on them, a residual of an equation."""
        out = original(*args, **kwargs)
        wanted = kwargs.get("create_graph", args[4] if len(args) > 4 else False)
        if wanted and not (self.in_backward or self.calls.inside or self._off) and self.recorder.is_own:
            with self.clock:
                self.tape.keep_grad(original, args, kwargs, out)
        return out

    def _note_loss(self, losses: list[Tensor], place: Line) -> None:
        if losses and losses[0].numel() == 1:
            self._loss = float(losses[0].detach()) / self.scaling.scale_of(losses[0])
        self.backward_at = place

    def parameters(self) -> list[Tensor]:
        """Those of all models, and those that optimizers step."""
        owned = self.names.owners
        stepped = [p for one in self.optimizers.values() for g in one.param_groups for p in g["params"]]
        others = {id(p): p for p in stepped if id(p) not in owned}
        return [*self.names.parameters(), *others.values()]

    # -- steps --------------------------------------------------------------------------------------------------

    def _made_optimizer(self, original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self._forget(id(optimizer))
        self.places[id(optimizer)] = users_line()
        original(optimizer, *args, **kwargs)
        self.optimizers[id(optimizer)] = optimizer
        if not self.names.models and self.recorder.is_own:
            with self.clock:
                self.names.look([optimizer])
                self._look_without_model(0)

    def _forget(self, key: int) -> None:
        """An optimizer that is gone had this id."""
        self._most = max(self._most, self._attempts.pop(key, 0))
        self._examined.discard(key)
        self._look_at_state.discard(key)

    def _look_without_model(self, turn: int) -> None:
        """Bare parameters and functions call no model that could be waited for: a step begins where the last ended."""
        if not self.names.models and self._every is not None:
            self._look.open(turn, None)
            self.tape.open_window()

    def gradients_are_true(self) -> None:
        """They have been unscaled, or are about to be: who reads them now reads what he means."""
        self._look.gradients_are_true()

    def paused(self) -> Any:
        """A context in which operators are a library's own."""
        return self._look.paused()

    def gradients_may_be_read(self) -> Any:
        """A context in which it is no matter that they are scaled."""
        return self._look.gradients_may_be_read()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not self.recorder.is_own:
            return None
        given = telling_closure(args, kwargs, lambda: self._about_to_step(optimizer))
        if given is None:
            self._about_to_step(optimizer)
        return given

    def _about_to_step(self, optimizer: Optimizer) -> None:
        first = id(optimizer) not in self._examined
        if not self._went_back and any(p.grad is not None for g in optimizer.param_groups for p in g["params"]):
            self._awaits_attempt = True  # gradients that the script made without a backward pass
        if not self._awaits_attempt and not first:
            return
        with self.clock:
            self.optimizers.setdefault(id(optimizer), optimizer)  # one that was made before the watching began
            if self._awaits_attempt:
                self._close_look(optimizer)
            if first:  # also the second of two that share a backward pass
                self._examined.add(id(optimizer))
                self.names.keep_stepped(list(self.optimizers.values()))
                self._look_at_state |= {id(optimizer)}
                for finding in before_first_step(self, optimizer):
                    self.tell(finding)
            self.stepped_at = users_line()
            self.scaling.before_step(optimizer, self.stepped_at)
            if self._every is not None:
                self._updates.before(optimizer, close=self.step % self._every == 0)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.recorder.is_own:
            return
        self._saw_step = True  # also of the second optimizer of one backward pass
        if not self._awaits_attempt:
            return
        with self.clock:
            findings = list(self._updates.after(optimizer))
            if id(optimizer) in self._look_at_state and optimizer.state:
                self._look_at_state.remove(id(optimizer))
                findings += after_first_step(self, optimizer)
            for finding in findings:
                self.tell(finding)
        if not self._in_attempt:
            self._attempted(optimizer, skipped=False)  # torch has run it; who skips does not
            self._stop_at_limit()

    def attempt(self, original: Any, *optimizers: Optimizer) -> Any:
        """A step by way of a scaler: `original()` takes it or skips it."""
        with self.clock:
            self._close_look(optimizers[0])
        self._in_attempt, self._saw_step = True, False
        try:
            out = original()
        except BaseException:
            self._in_attempt = False
            self._attempted(optimizers[0], skipped=True)
            raise
        self._in_attempt = False
        self._attempted(optimizers[0], skipped=not self._saw_step or self.soundness.bad_gradients)
        for other in optimizers[1:]:
            self._attempts[id(other)] = self._attempts.get(id(other), 0) + 1
        self._stop_at_limit()
        return out

    def _attempted(self, optimizer: Optimizer | None, skipped: bool) -> None:
        if not self.recorder.is_own:
            return
        with self.clock:
            optimizer = optimizer or next(iter(self.optimizers.values()), None)
            step = self._attempts.get(id(optimizer), 0)
            bad = self.bad
            skipped = self.soundness.stepped(skipped)
            self._look.attempted(taken=not skipped)
            self.recorder.write(
                "step", step=step, loss=self._loss, scale=self.scaling.scale, skipped=skipped, bad=bad,
                seconds=self.clock.seconds, **self.scaling.since_last(),
            )  # fmt: skip
            self._attempts[id(optimizer)] = step + 1
            self._awaits_attempt = False
            self.losses.clear()
            self.tape.clear()
            self._look_without_model(self._turn)

    def _stop_at_limit(self) -> None:
        """Leave the script where it has just stepped. Not from a hook while an error is under way, nor at the end."""
        if self._limit is not None and self.step >= self._limit and self.recorder.is_own:
            self.recorder.write("limit", steps=self._limit)
            raise SystemExit(0)

    def flush(self) -> None:
        """Record what is known of the steps so far."""
        self._look.settle()

    def _failed(self, error: Exception) -> None:
        """Something of ours went wrong: say so, look no further, and let the script go on as if nobody had looked."""
        if self.recorder.is_own and not self._off:
            lines = traceback.format_exception(type(error), error, error.__traceback__)
            self.recorder.write("failed", step=self.step, error=repr(error)[:500], trace="".join(lines)[-4000:])
        self._off = True
        self.calls.close()
        self.tape.clear()
        self._look.give_up()
