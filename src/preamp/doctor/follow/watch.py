"""Follows a training script from outside: hooks on model calls, backward passes, and steps of optimizers."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...tree import tensors
from ..hooks import is_traced
from ..names import Names, unwrapped
from ..places import users_line
from ..records import NOWHERE, Recorder
from .inspection import Inspection
from .precision import Precision
from .run import Run
from .scalers import Scalers
from .scales import Scales
from .soundness import Soundness
from .steps import Steps


class Watch:
    """One process under observation. `start` begins, `end` takes everything back and writes the last record.

    `every`: magnitudes are counted in one of `every` steps; `steps`: the script is left after so many; `replay`: do a
    step that was not finite again; `names`: the models, where no others are meant.
    """

    current: Watch | None = None
    """The one of this process: torch is wrapped once, and a second watch would see the first one's doing."""

    def __init__(
        self,
        recorder: Recorder,
        base: Path,
        every: int | None,
        steps: int | None,
        replay: bool,
        names: Names | None = None,
    ) -> None:
        run = self.run = Run(recorder, base, names)
        self.scales, self._precision = Scales(run), Precision(run, self._compiled)
        self._inspection = Inspection(run, self.scales, self._precision, every, replay)
        self._soundness = Soundness(run, self.scales, replay)
        self.steps = Steps(run, self.scales, self._precision, self._inspection, self._soundness, steps)
        self._scalers = Scalers(run, self.scales, self._inspection, self.steps.attempt)
        self._hook: Any = None
        run.on_failure += [self._unhook, run.tape.clear, self._inspection.give_up]

    @classmethod
    def of_this_process(cls) -> Watch | None:
        """The one that is going on, if any; none in a forked child."""
        return cls.current if cls.current is not None and cls.current.run.is_own else None

    def start(self) -> None:
        """Hook model calls, backward passes and steps."""
        import torch.optim.optimizer as base

        Watch.current = self
        patches = self.run.patches
        patches.wrap(torch.autograd, "backward", self._backward, always=True)
        patches.wrap(torch.autograd, "grad", self._grad)
        patches.wrap(Optimizer, "__init__", self._made_optimizer)
        patches.on_close(base.register_optimizer_step_pre_hook(self._before_step).remove)
        patches.on_close(base.register_optimizer_step_post_hook(self._after_step).remove)
        self._scalers.start()
        self._precision.start()
        patches.wrap(sys, "excepthook", self._uncaught, always=True)
        warnings.filterwarnings("ignore", message="Using `torch.compile", category=UserWarning)  # about our hooks
        rule = warnings.filters[0]
        patches.on_close(lambda: rule in warnings.filters and warnings.filters.remove(rule))  # type: ignore[attr-defined]
        self._hook_calls()
        self._precision.on_first_cast = lambda: self._inspection.wait(0)

    def end(self) -> None:
        """The script is over."""
        run = self.run
        if Watch.current is self:
            Watch.current = None
        if not run.is_own:
            return
        self.steps.end()
        run.patches.close()
        self._unhook()
        self._inspection.close()
        run.tape.clear()
        run.stream.leave()
        if run.step:
            counts = {
                **self.scales.since_last(),
                "scaler_at": self.scales.scaler_at if self.scales.by_scaler else NOWHERE,
            }
            run.recorder.write("end", spent=run.clock.spent, seconds=run.clock.seconds, **counts)

    # -- model calls: the outermost of a model that is trained; what it calls inside is not followed

    def _hook_calls(self) -> None:
        if self._hook is None:
            self._hook = nn.modules.module.register_module_forward_pre_hook(self._enter)

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _enter(self, module: nn.Module, args: Any) -> None:
        if is_traced() or self.run.is_ours or not self.run.is_followed():
            return
        self._precision.called(module)
        self._inspection.leave_compiled_alone()
        kwargs = sys._getframe(1).f_locals.get("kwargs", {})
        if not self.run.names.wants(module):
            return
        if not torch.is_grad_enabled():
            self._evaluate(module, args, kwargs)
            return
        call = self._open(module, args, kwargs)

        def left(_: nn.Module, __: Any, out: Any) -> None:
            after.remove()
            error = sys.exc_info()[1]
            if out is None and error is not None:  # torch calls this hook while the error is on its way up
                self.run.raised(error)
            self._close(call, out)

        after = module.register_forward_hook(left, always_call=True)

    def _evaluate(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A model is called without gradients, inside of a step that is looked at or outside of it."""
        call = None
        with self.run.clock:
            call = self._inspection.evaluate(module, args, kwargs)
        if call is None:
            return
        self.run.in_model = True

        def left(_: nn.Module, __: Any, out: Any) -> None:
            after.remove()
            self.run.in_model = False
            with self.run.clock:
                self._inspection.evaluation.model_returned(call, out)

        after = module.register_forward_hook(left, always_call=True)

    def _compiled(self, module: nn.Module, compiled: Any, args: Any, kwargs: Any) -> Any:
        """A call by way of `module.compile()`: torch's hooks are part of the compiled code, and ours must not be."""
        run = self.run
        if run.is_ours or not (torch.is_grad_enabled() and run.is_followed() and run.names.wants(module)):
            return compiled(*args, **kwargs)
        call, out = self._open(module, args, kwargs), None
        try:
            out = self.run.noting_errors(compiled)(*args, **kwargs)
        finally:
            self._close(call, out)
        return out

    def _open(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._unhook()
        self.run.in_model = True
        self.run.names.callers[unwrapped(module)] = threading.get_ident()
        call = None
        with self.run.clock:
            self._scalers.look_for_apex()
            call = self.steps.model_called(module, args, kwargs)
        return call  # noqa: RET504  # an error of ours ends the region before

    def _close(self, call: Any, out: Any) -> None:
        self.run.in_model = False
        if call is None:
            return  # the observation has ended
        self._hook_calls()
        if out is not None:
            self.steps.model_returned(call, out)

    # -- backward passes

    def _backward(self, original: Any, tensors_: Any, *args: Any, **kwargs: Any) -> Any:
        run = self.run
        if not run.trains() or run.is_ours or run.is_given_up:
            return original(tensors_, *args, **kwargs)
        losses = list(tensors(tensors_))
        with run.clock:
            self.steps.before_backward(losses)
        run.in_backward = True
        try:
            out = original(tensors_, *args, **kwargs)
        finally:
            run.in_backward = False
        with run.clock, run.stream.paused():  # it is the doctor that reads gradients here
            self.steps.after_backward(losses, bool(kwargs.get("retain_graph")))
        return out

    def _grad(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Gradients as a part of the loss: a penalty on them, a residual of an equation."""
        run = self.run
        out = original(*args, **kwargs)
        wanted = kwargs.get("create_graph", args[4] if len(args) > 4 else False)
        if wanted and not (run.is_ours or run.is_given_up):
            with run.clock:
                run.tape.keep_grad(original, args, kwargs, out)
                self._inspection.grad_asked(kwargs.get("outputs", args[0] if args else ()), out)
        return out

    def _uncaught(self, original: Any, kind: Any, error: Any, trace: Any) -> None:
        """The script ends by this error: would float32 have ended by it, too?"""
        if self.run.is_own:
            with self.run.clock:
                if isinstance(error, Exception):
                    self._inspection.close()
                    self._soundness.died(self._inspection.ran_low, self._inspection.decided)
            self.run.uncaught(kind, error, trace)
        original(kind, error, trace)

    # -- optimizers

    def _made_optimizer(self, original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        at = users_line(optimizer)
        original(optimizer, *args, **kwargs)
        self.steps.optimizer_made(optimizer, at)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not self.run.trains():
            return None
        given = _with_closure(args, kwargs, lambda: self.steps.before_step(optimizer))
        if given is None:
            self.steps.before_step(optimizer)
        return given

    _before_step.changes_nothing = True  # type: ignore[attr-defined]

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.run.is_followed():
            self.steps.after_step(optimizer)


def _with_closure(args: Any, kwargs: Any, notify: Callable[[], None]) -> tuple[Any, Any] | None:
    """The arguments of an optimizer's step with a closure that says when it has made the gradients; None without."""
    closure = kwargs.get("closure") or next((one for one in args[1:] if callable(one)), None)
    if closure is None:
        return None

    def watched() -> Any:
        out = closure()
        notify()
        return out

    swap = {id(closure): watched}
    named = {name: swap.get(id(value), value) for name, value in kwargs.items()}
    return tuple(swap.get(id(value), value) for value in args), named
