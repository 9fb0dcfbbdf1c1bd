"""The steps of a run. One begins with the first call of a model under autograd and ends with an attempt to step.

Loss and gradients are checked after each backward pass, before anything can be done with them.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...tree import tensors
from ..findings.events import FirstStep, WithoutMasters
from ..measure import values_here
from ..names import unwrapped
from ..places import is_users, users_line
from ..records import NOWHERE, Line
from .inspection import Inspection
from .precision import Precision
from .run import Run
from .scales import Scales
from .soundness import Soundness

_TORCHS = Optimizer.zero_grad.__code__


class Steps:
    """Takes calls, backward passes and steps from the hooks, and records every attempt."""

    def __init__(
        self,
        run: Run,
        scales: Scales,
        precision: Precision,
        inspection: Inspection,
        soundness: Soundness,
        limit: int | None,
    ) -> None:
        self._run, self._scales, self._precision = run, scales, precision
        self._inspection, self._soundness = inspection, soundness
        self._limit = limit
        self._examined: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._without_masters: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Those that are asked after their first step whether they keep masters."""
        self._loss: float | None = None
        self._awaits_attempt = self._went_back = False
        self._in_attempt = self._saw_step = False
        self._versions: list[tuple[int, int]] = []
        """Versions of weights and gradients after a backward pass, where no optimizer is known."""

    def end(self) -> None:
        """The script is over."""
        if self._awaits_attempt:
            self._attempted(None, skipped=not self._is_stepped_otherwise)

    # -- model calls

    def model_called(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A model is about to run; what is returned is handed to `model_returned`."""
        run = self._run
        if self._awaits_attempt and self._is_stepped_otherwise:
            self._attempted(None, skipped=False)
        self._note_skip()
        run.names.get(module)
        run.names.is_sharded |= type(module).__name__ == "FullyShardedDataParallel"
        self._precision.model_called()
        call = run.tape.enter_model(unwrapped(module), args, kwargs)
        self._inspection.open(run.turn, module)
        return call

    def model_returned(self, call: Any, out: Any) -> None:
        """A model has returned `out`."""
        with self._run.clock:
            self._run.tape.leave_model(call, out, self._precision.compiled != "function")

    def _versions_now(self) -> list[tuple[int, int]]:
        parameters = self._run.names.parameters()
        return [(p._version, -1 if p.grad is None else p.grad._version) for p in parameters]

    @property
    def _is_stepped_otherwise(self) -> bool:
        """Whether weights or gradients were changed since the backward pass, and by no optimizer of torch's.

        Weights that are written through .data keep their version; gradients that are cleared for the next step do not.
        """
        return not self._run.optimizers and self._versions != self._versions_now()

    def _note_skip(self) -> None:
        """Gradients that are not finite were cleared and no step taken, if so: the script has left it out, or Apex."""
        run = self._run
        if self._awaits_attempt and run.bad:
            with run.stream.paused():
                gradients = [values_here(p.grad) for p in run.parameters() if p.grad is not None]
                left = any(bool(gradient.any()) for gradient in gradients)
            if not left:
                self._attempted(None, skipped=True)

    # -- backward passes

    def before_backward(self, losses: list[Tensor]) -> None:
        """The script goes back from these."""
        run, scales = self._run, self._scales
        self._note_skip()
        run.tape.close_window()
        # a scaler that only ever skips halves its scale down to 0, by which nothing can be divided
        scale, seed = (scales.of(losses[0]) if losses else 1.0), scales.seed_of(losses)
        run.backward_at = users_line()
        if losses and losses[0].numel() == 1:
            self._loss = float(losses[0].detach()) * seed / scale if scale else None
        run.losses += losses
        scales.before_backward(losses, self._inspection.looks)
        self._inspection.before_backward(scale or 1.0, losses)

    def after_backward(self, losses: list[Tensor], keeps_graph: bool) -> None:
        """Gradients have arrived."""
        run = self._run
        self._awaits_attempt, self._saw_step = True, False
        self._scales.after_backward(losses)
        self._soundness.check(losses)
        self._went_back = True
        self._inspection.after_backward()
        if not run.optimizers:  # the script, or a library, steps by other means, which no hook sees
            self._close_step(None)
            self._versions = self._versions_now()
        if run.tape.is_long and not run.bad and not keeps_graph:
            run.tape.clear()  # of a long accumulation: the inputs of sound micro-batches are the script's memory

    def _close_step(self, optimizer: Optimizer | None) -> None:
        """The step is whole: nothing more is kept of it, and what was seen is judged."""
        self._run.tape.close_window()
        self._soundness.before_step()
        self._inspection.before_step(optimizer)

    # -- steps

    def optimizer_made(self, optimizer: Optimizer, at: Line) -> None:
        """A step may begin with it."""
        run = self._run
        run.optimizers[optimizer] = at
        if not run.step:
            with run.clock:
                if not run.names.models:
                    run.names.search([optimizer])
                self._await_step(0)

    def _await_step(self, turn: int) -> None:
        """Bare parameters and functions call no model that could be waited for: a step begins where the last ended."""
        if self._run.names.models:
            self._inspection.wait(turn)
        elif self._inspection.every is not None:
            self._inspection.open(turn, None)
            self._run.tape.open_window()

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer of torch's is about to step, with its gradients."""
        run, first = self._run, optimizer not in self._examined
        if not self._went_back and any(p.grad is not None for g in optimizer.param_groups for p in g["params"]):
            self._awaits_attempt = True  # gradients that the script made without a backward pass
        with run.clock:
            if self._awaits_attempt or first:
                run.optimizers.setdefault(optimizer, NOWHERE)  # one that was made before the watching began
                if self._awaits_attempt:
                    self._close_step(optimizer)
                if first:  # also the second of two that share a backward pass
                    self._first_step(optimizer)
                run.stepped_at = users_line()
                self._inspection.steps(optimizer)
                if is_users(getattr(inspect.unwrap(type(optimizer).step), "__code__", _TORCHS).co_filename):
                    self._inspection.wait(run.turn)
            self._scales.before_step(optimizer)  # last: the step is closed with what is on its gradients

    def _first_step(self, optimizer: Optimizer) -> None:
        run, optimizers = self._run, list(self._run.optimizers)
        self._examined.add(optimizer)
        run.names.keep_stepped(optimizers)
        by_session = any(optimizer in one.optimizers.values() and one.policy.masters for one in self._scales.sessions)
        if not by_session and not hasattr(optimizer, "_amp_stash"):  # which Apex leaves
            self._without_masters.add(optimizer)
        run.emit(FirstStep(optimizer, run.optimizers[optimizer], optimizers, run.names))

    def after_step(self, optimizer: Optimizer) -> None:
        """It has stepped."""
        run = self._run
        self._saw_step = True  # also of the second optimizer of one backward pass
        with run.clock:
            if optimizer in self._without_masters:
                self._without_masters.remove(optimizer)
                if _steps_halves(optimizer):
                    run.emit(WithoutMasters(optimizer, run.optimizers.get(optimizer, NOWHERE), run.names))
        if not self._awaits_attempt:
            return
        with run.clock:
            self._inspection.steps(None)
        if not self._in_attempt:
            self._attempted(optimizer, skipped=False)  # torch has run it; a skipped one is not run
            self._stop_at_limit()

    def attempt(self, original: Any, *optimizers: Optimizer) -> Any:
        """A step by way of a scaler: `original()` takes it or skips it."""
        with self._run.clock:
            self._close_step(optimizers[0])
        self._in_attempt, self._saw_step = True, False
        try:
            out = original()
        except BaseException:
            self._in_attempt = False
            self._attempted(optimizers[0], skipped=True)
            raise
        self._in_attempt = False
        self._attempted(optimizers[0], skipped=not self._saw_step or self._soundness.bad_gradients)
        for other in optimizers[1:]:
            self._run.attempted(other)
        self._stop_at_limit()
        return out

    def _attempted(self, optimizer: Optimizer | None, skipped: bool) -> None:
        run = self._run
        if not run.is_own:
            return
        with run.clock:
            of: Any = optimizer or next(iter(run.optimizers), run)
            step, bad = run.attempts.get(of, 0), run.bad
            skipped = self._soundness.stepped(skipped)
            self._inspection.attempted()
            facts = {"step": step, "loss": self._loss, "scale": self._scales.scale, "skipped": skipped, "bad": bad}
            run.recorder.write("step", **facts, seconds=run.clock.seconds, **self._scales.since_last())
            run.attempted(of)
            self._awaits_attempt = False
            run.losses.clear()
            run.tape.clear()
            self._await_step(run.turn)

    def _stop_at_limit(self) -> None:
        """Leave the script where it has just stepped. Not from a hook while an error is under way, nor at the end."""
        if self._limit is not None and self._run.step >= self._limit and self._run.is_own:
            self._run.recorder.write("limit", steps=self._limit)
            raise SystemExit(0)


def _steps_halves(optimizer: Optimizer) -> bool:
    """Whether an optimizer that has stepped float16 parameters keeps no float32 copy of them."""
    kept = [t for t in tensors(list(optimizer.state.values())) if t.dim() and t.dtype is torch.float32]
    halves = [p.detach() for group in optimizer.param_groups for p in group["params"] if p.dtype is torch.float16]
    return bool(halves) and not any(
        t.shape == half.shape and bool((t.to(half.dtype) == half).all()) for half in halves for t in kept
    )
