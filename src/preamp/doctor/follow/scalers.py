"""Hooks on all that scales, clips and schedules: torch's scalers and their subclasses, preamp's sessions, Apex."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...errors import PreampError, SessionError
from ...session import Session, SessionScaler
from ..findings.events import Clipper, GradientsClipped
from ..hooks import subclasses
from ..places import users_line
from .inspection import Inspection
from .run import Run
from .scales import Scales

Attempt = Callable[..., Any]
"""`attempt(original, *optimizers)`: a step by way of a scaler, which takes it or skips it."""


class Scalers:
    """Keeps `Scales` true, and has steps that go by way of a scaler or a session counted as attempts."""

    def __init__(self, run: Run, scales: Scales, inspection: Inspection, attempt: Attempt) -> None:
        self._run, self._scales, self._inspection, self._attempt = run, scales, inspection, attempt
        self._followed: set[type] = set()
        self._apex: Any = None

    def start(self) -> None:
        """Hook scalers, sessions, schedulers and clipping."""
        patches = self._run.patches
        scaler = torch.amp.grad_scaler.GradScaler
        patches.wrap(scaler, "__init__", self._made_scaler)
        for kind in subclasses(scaler):
            self._follow(kind)
        patches.wrap(Session, "__init__", self._made_session)
        patches.wrap(SessionError, "__init__", self._refused)
        patches.wrap(Session, "scale", self._session_scale)
        patches.wrap(Session, "backward", self._session_backward)
        patches.wrap(Session, "unscale_", self._session_unscale)
        patches.wrap(Session, "clip_grad_norm_", self._session_clip)
        patches.wrap(Session, "clip_grad_value_", self._session_clip)
        patches.wrap(Session, "step", self._session_step)
        for kind in subclasses(LRScheduler):
            if "step" in vars(kind):
                patches.wrap(kind, "step", self._schedule)
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                patches.wrap(owner, name, self._clip)

    @contextmanager
    def _library(self) -> Iterator[None]:
        """What is done with gradients inside is a library's own business."""
        self._scales.is_library, before = True, self._scales.is_library
        try:
            yield
        finally:
            self._scales.is_library = before

    def _clip(self, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        self._inspection.gradients_are_true()
        clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)  # it may have been a generator
        scales = self._scales
        if scales.are_still_scaled(clipped):
            within: Clipper = "apex" if scales.in_apex else "session" if scales.by_session else None
            op = getattr(original, "__name__", "clipping")
            self._run.emit(GradientsClipped(op, scales.scale or 1.0, within, users_line()))
        with self._library():
            return original(clipped, *args, **kwargs)

    def _schedule(self, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(scheduler, "_is_initial", False) and self._run.step:
            self._scales.schedules += 1
            self._scales.schedule_at = users_line()
        return original(scheduler, *args, **kwargs)

    # -- torch's scaler

    def _follow(self, kind: type) -> None:
        """Wrap the methods that this class defines itself."""
        if kind in self._followed:
            return
        self._followed.add(kind)
        around = {"scale": self._scale, "unscale_": self._unscale, "step": self._step, "update": self._update}
        for name in around.keys() & vars(kind).keys():
            self._run.patches.wrap(kind, name, self._run.noting_errors(around[name]))

    def _made_scaler(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        for kind in type(scaler).__mro__:
            if issubclass(kind, torch.amp.grad_scaler.GradScaler):
                self._follow(kind)  # one that was written or imported after the start
        original(scaler, *args, **kwargs)
        if scaler.is_enabled() and not isinstance(scaler, SessionScaler):  # whose session updates the scale in its step
            self._scales.scaler_at = users_line()
            self._scales.scalers += 1

    def _scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        out = original(scaler, outputs)
        if isinstance(out, Tensor) and scaler.is_enabled() and not isinstance(scaler, SessionScaler):  # it has noted it
            self._scales.note(out, float(scaler.get_scale()))
            self._scales.by_scaler = True
        return out

    def _unscale(self, original: Any, scaler: Any, optimizer: Optimizer) -> Any:
        self._inspection.gradients_are_true()
        if not scaler.is_enabled():
            return original(scaler, optimizer)
        self._scales.step_begins(optimizer, mixed=self._scales.mixed(optimizer))
        out = original(scaler, optimizer)
        self._scales.gradients.unscaled(optimizer)
        self._scales.is_pending = False
        return out

    def _step(self, original: Any, scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        scales = self._scales
        if scales.is_library or not scaler.is_enabled():
            return original(scaler, optimizer, *args, **kwargs)
        scales.step_begins(optimizer, mixed=scales.mixed(optimizer), updated_at=scales.updated_at)
        try:
            with self._library():
                return self._attempt(lambda: original(scaler, optimizer, *args, **kwargs), optimizer)
        finally:
            scales.gradients.stepped(optimizer, by_scaler=True)
            scales.is_pending = False

    def _update(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        self._scales.updates += 1
        self._scales.updated_at = users_line()
        return original(scaler, *args, **kwargs)

    # -- preamp's session

    def _made_session(self, original: Any, session: Session, *args: Any, **kwargs: Any) -> None:
        original(session, *args, **kwargs)
        self._scales.sessions.add(session)

    def _refused(self, original: Any, error: SessionError, *args: Any) -> None:
        """A session refuses something, which may be a finding also where the script catches the error."""
        original(error, *args)
        self._run.raised(error)

    def _by_session(self, session: Session, name: str | None, scaled: Tensor | None = None) -> None:
        """A session scales a loss of this name."""
        self._scales.by_session = True
        self._scales.sessions.add(session)
        try:
            scale = session.loss_scale(name)
        except PreampError:  # several losses and none named: the session itself will say so
            return
        if scale != 1 or self._scales.are_used:  # one that has come down to 1 is one all the same
            kind = session._losses[session._losses.named(name)].kind
            self._scales.note(scaled, scale, adapts=kind not in ("none", "static"))

    def _session_scale(self, original: Any, session: Session, *args: Any, **kwargs: Any) -> Any:
        out = original(session, *args, **kwargs)
        self._by_session(session, kwargs.get("name", args[1] if len(args) > 1 else None), out)
        return out

    def _session_backward(self, original: Any, session: Session, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        scales = self._scales
        self._by_session(session, kwargs.get("name"))
        scales.unscales_itself = session._losses.separate_scales
        scales.begins_at = loss
        try:
            with self._library():
                return original(session, loss, *args, **kwargs)
        finally:
            scales.begins_at = None
            scales.is_pending, scales.unscales_itself = scales.are_used and not scales.unscales_itself, False

    def _session_unscale(self, original: Any, session: Session, *args: Any, **kwargs: Any) -> Any:
        self._scales.is_pending = False
        return original(session, *args, **kwargs)

    def _session_clip(self, original: Any, session: Session, *args: Any, **kwargs: Any) -> Any:
        with self._library():  # a session knows what is on them
            return original(session, *args, **kwargs)

    def _session_step(self, original: Any, session: Session, *args: Any, **kwargs: Any) -> Any:
        if self._scales.is_library:
            return original(session, *args, **kwargs)
        given = kwargs.get("optimizer", args[0] if args else None)
        stepped = [given] if isinstance(given, Optimizer) else list(session.optimizers.values())
        try:
            with self._library():
                return self._attempt(lambda: original(session, *args, **kwargs), *stepped)
        finally:
            self._scales.is_pending = False

    # -- Apex, whose own work with gradients is no doing of the script's

    def look_for_apex(self) -> None:
        """Follow `amp.scale_loss` if the script has imported it by now."""
        amp = sys.modules.get("apex.amp") or getattr(sys.modules.get("apex"), "amp", None)
        if amp is not None and self._apex is not amp and hasattr(amp, "scale_loss"):
            self._apex = amp
            self._run.patches.wrap(amp, "scale_loss", self._scale_loss)

    @contextmanager
    def _scale_loss(self, original: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        scales, paused = self._scales, self._run.stream.paused
        scales.in_apex = True
        try:
            with ExitStack() as leaving:
                after = leaving.enter_context(ExitStack())
                with self._library():  # which puts gradients aside; the scaled loss is part of the step
                    scaled = leaving.enter_context(original(*args, **kwargs))
                leaving.callback(lambda: after.enter_context(paused()))  # before it flattens and unscales
                self._note_apex(scaled, args[0] if args else None)
                yield scaled
            self._inspection.gradients_are_true()
        finally:
            scales.in_apex = scales.is_pending = False

    def _note_apex(self, scaled: Any, loss: Any) -> None:
        if isinstance(scaled, Tensor) and isinstance(loss, Tensor) and loss.numel() == 1:
            scale = self._run.tape.factor_on(scaled) or float(scaled.detach().double() / loss.detach().double())
            if scale == scale and scale not in (0.0, 1.0, float("inf")):
                self._scales.note(scaled, scale)
