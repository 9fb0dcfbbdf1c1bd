"""What a script does with loss scales: PA106 and PA107, and the counts from which PA203 and PA108 are judged."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import PreampError
from ..report import Finding
from ..session import Session
from ..session import _step as session_step
from ..tree import tensors
from ._apex import Apex
from ._patches import Patches, subclasses_with
from ._scaled import (
    APEX_CLIP,
    SCALED_SESSION,
    SESSION_BACKWARD,
    Gradients,
    clipped_scaled,
    goes_back_in_half,
    left_out,
    like_a_scale,
    mixed_up,
    never_scaled,
    never_taken_off,
    unguarded,
    updated_between,
)
from ._stack import Line, users_line
from ._state import is_well_known

if TYPE_CHECKING:
    from ._watch import Watch


class Scaling:
    """Follows torch's scalers (and their subclasses), preamp's sessions, and Apex's `scale_loss`."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.active = False
        """Whether anything scaled a loss so far."""
        self.scale: float | None = None
        """The last one used."""
        self._scaled: list[tuple[weakref.ref[Tensor], float]] = []
        self._pending = False
        """Whether gradients lie there that are still scaled."""
        self._gradients = Gradients()
        self._backward_scale = 1.0
        self._depth = 0
        """Backward passes that are under way: checkpointing goes back inside of one."""
        self._low_half = False
        """Whether products ran in float16."""
        self._followed: set[type] = set()
        self._stepping = False
        self.sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        """Those that were made, or went back."""
        self._made: Line | None = None
        self._used = self._session = False
        self._apart = False
        """Whether a session goes back whose losses have scales of their own: it leaves true gradients."""
        self._apex = Apex(self, watch)
        self._scaled_now = False
        """Whether a loss that went back since the last look was scaled."""
        self._half_unscaled = False
        """Whether one that no scaler scaled went back through float16."""
        self._updated_at: Line | None = None
        self._schedules = self._updates = 0
        self._schedule_place: Line = (None, None)
        self._loss_place: Line = (None, None)
        """Where a loss was last scaled."""
        self._patches: Patches | None = None

    def start(self, patches: Patches) -> None:
        """Have scalers, sessions, schedulers and clipping tell."""
        self._patches = patches
        import torch.optim.optimizer as base

        scaler = torch.amp.grad_scaler.GradScaler
        patches.wrap(scaler, "__init__", self._made_scaler)
        self._follow(scaler)
        for kind in subclasses_with(scaler, "step"):
            self._follow(kind)
        patches.wrap(torch.autograd, "backward", self._backward)
        patches.on_close(base.register_optimizer_step_pre_hook(self._about_to_step).remove)
        patches.wrap(Session, "__init__", self._made_session)
        patches.wrap(session_step, "check_own_step", self._watch.errors.telling(_as_it_is))
        patches.wrap(Session, "scale", self._session_scale)
        patches.wrap(Session, "backward", self._session_backward)
        patches.wrap(Session, "unscale_", self._session_unscale)
        patches.wrap(Session, "clip_grad_norm_", self._session_quiet)
        patches.wrap(Session, "clip_grad_value_", self._session_quiet)
        patches.wrap(Session, "step", self._session_step)
        patches.wrap(torch.optim.lr_scheduler.LRScheduler, "step", self._schedule)
        for kind in subclasses_with(torch.optim.lr_scheduler.LRScheduler, "step"):
            patches.wrap(kind, "step", self._schedule)
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                patches.wrap(owner, name, self._clip)

    # -- torch's scaler

    def _follow(self, kind: type) -> None:
        """Have the methods tell that this class defines itself."""
        if kind in self._followed or self._patches is None:
            return
        self._followed.add(kind)
        around = {"scale": self._scale, "unscale_": self._unscale, "step": self._step, "update": self._update}
        for name in around.keys() & vars(kind).keys():
            self._patches.wrap(kind, name, self._watch.errors.telling(around[name]))

    def _made_scaler(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        for kind in type(scaler).__mro__:
            if issubclass(kind, torch.amp.grad_scaler.GradScaler):
                self._follow(kind)  # one that was written or imported after the start
        original(scaler, *args, **kwargs)
        if scaler.is_enabled():
            self._made = users_line()

    def _backward(self, original: Any, tensors_: Any, *args: Any, **kwargs: Any) -> Any:
        """Outermost of those who listen to backward passes: what they do again changes gradients too."""
        optimizers = list(self._watch.optimizers.values())
        if self._depth == 0:
            with self._watch.clock:
                self._gradients.before_backward(optimizers)
        self._depth += 1
        try:
            out = original(tensors_, *args, **kwargs)
        finally:
            self._depth -= 1
        if self._depth == 0:
            losses = list(tensors(tensors_))
            by_scaler = any(self._noted(loss) not in (None, 1.0) for loss in losses)
            by_scaler &= not self._apex.inside and not self._session
            by_hand = None
            if len(losses) == 1 and not (self._session or self._apex.inside or self._made):
                factor = self._watch.tape.factor_on(losses[0])
                by_hand = factor if factor is not None and like_a_scale(factor) else None
            with self._watch.clock:
                self._gradients.after_backward(optimizers, by_scaler, by_hand)
        return out

    def _scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        out = original(scaler, outputs)
        if isinstance(out, Tensor) and scaler.is_enabled():
            self.note(out, float(scaler.get_scale()))
        return out

    def note(self, scaled: Tensor, scale: float) -> None:
        """A loss with a scale on it."""
        self.active, self.scale, self._loss_place = True, scale, users_line()
        self._scaled = [(ref, s) for ref, s in self._scaled if ref() is not None][-8:]
        self._scaled.append((weakref.ref(scaled), scale))

    def _unscale(self, original: Any, scaler: Any, optimizer: Optimizer) -> Any:
        self._watch.gradients_are_true()
        if not scaler.is_enabled():
            return original(scaler, optimizer)
        self._look_for_mixed(optimizer)
        out = original(scaler, optimizer)
        self._gradients.unscaled(optimizer)
        self._pending = False
        return out

    def _look_for_mixed(self, optimizer: Optimizer) -> None:
        """PA107: gradients that were unscaled were left lying, and a backward pass added scaled ones."""
        count = self._gradients.mixed(optimizer)
        if not count or not self.scale or self.scale == 1:
            return
        self._gradients.stepped(optimizer)  # once
        self._watch.tell(mixed_up(count, self.scale, optimizer, users_line()))

    def _step(self, original: Any, scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self._stepping or not scaler.is_enabled():
            return original(scaler, optimizer, *args, **kwargs)
        if self._updated_at is not None:
            self._watch.tell(updated_between(self._updated_at))
        self._look_for_mixed(optimizer)
        self._stepping = True
        try:
            return self._watch.attempt(lambda: original(scaler, optimizer, *args, **kwargs), optimizer)
        finally:
            self._gradients.stepped(optimizer)
            self._stepping = self._pending = False

    def _update(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        self._updates += 1
        self._updated_at = users_line()
        return original(scaler, *args, **kwargs)

    # -- preamp's session

    def _made_session(self, original: Any, session: Session, *args: Any, **kwargs: Any) -> None:
        original(session, *args, **kwargs)
        self.sessions.add(session)

    def _session_scale(self, original: Any, session: Session, *args: Any, **kwargs: Any) -> Any:
        out = original(session, *args, **kwargs)
        self._session = True
        self.sessions.add(session)
        self._from_session(session, out, kwargs.get("name", args[1] if len(args) > 1 else None))
        return out

    def _from_session(self, session: Session, scaled: Tensor | None, name: str | None) -> None:
        try:
            scale = session.loss_scale(name)
        except PreampError:  # several losses and none named: the session itself will say so
            return
        if scale != 1 or self.active:  # one that has come down to 1 is one all the same
            self.active, self.scale, self._loss_place = True, scale, users_line()
            if scaled is not None:
                self.note(scaled, scale)

    def _session_backward(self, original: Any, session: Session, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._session = True
        self.sessions.add(session)
        self._from_session(session, None, kwargs.get("name"))
        self._stepping, before = True, self._stepping
        self._apart = session._losses.separate_scales
        try:
            return original(session, loss, *args, **kwargs)
        finally:
            self._stepping = before
            self._pending, self._apart = self.active and not self._apart, False

    def _session_unscale(self, original: Any, session: Session, *args: Any, **kwargs: Any) -> Any:
        self._pending = False
        return original(session, *args, **kwargs)

    def _session_quiet(self, original: Any, session: Session, *args: Any, **kwargs: Any) -> Any:
        self._stepping, before = True, self._stepping
        try:
            with self._watch.gradients_may_be_read():  # a session knows what is on them
                return original(session, *args, **kwargs)
        finally:
            self._stepping = before

    def _session_step(self, original: Any, session: Session, *args: Any, **kwargs: Any) -> Any:
        if self._stepping:
            return original(session, *args, **kwargs)
        self._stepping = True
        given = kwargs.get("optimizer", args[0] if args else None)
        stepped = [given] if isinstance(given, Optimizer) else list(session.optimizers.values())
        try:
            return self._watch.attempt(lambda: original(session, *args, **kwargs), *stepped)
        finally:
            self._stepping = self._pending = False

    # -- what follows from it

    def look_for_apex(self) -> None:
        """Follow `amp.scale_loss` once the script has imported it."""
        if self._patches is not None:
            self._apex.look(self._patches)

    def left_apex(self) -> None:
        """A `scale_loss` block is over: it has unscaled."""
        self._pending = False

    def _noted(self, loss: Tensor) -> float | None:
        """The scale that a scaler put on this very loss, which may be 1; None for one that nobody scaled."""
        return next((scale for ref, scale in self._scaled if ref() is loss), None)

    def is_scaled(self, loss: Tensor) -> bool:
        """Whether a scaler put its scale on this very loss."""
        return self._noted(loss) is not None

    def scale_of(self, loss: Tensor) -> float:
        """The scale that is on a loss; 1 for one that nobody scaled."""
        noted = self._noted(loss)
        if noted is not None:
            return noted
        return self.scale if self._session and self._stepping and self.scale else 1.0

    def scale_of_backward(self) -> float:
        """The scale that was on the loss of the last backward pass, whatever happened to the gradients since."""
        return self._backward_scale

    def scale_now(self) -> float:
        """The scale on the gradients as they lie there."""
        return self.scale if self._pending and self.scale else 1.0

    def before_backward(self, losses: list[Tensor], low: set[torch.dtype]) -> None:
        """The second loss of a step may have no model call of its own to be judged by: its graph tells."""
        if self._used and not self._stepping and torch.float16 in low and self._watch.step < 3:
            self._half_unscaled |= any(self._noted(loss) is None and goes_back_in_half(loss) for loss in losses)

    def after_backward(self, losses: list[Tensor]) -> None:
        """Gradients have arrived."""
        self._updated_at = None
        scaled = any(self.scale_of(loss) != 1 for loss in losses) or self._apex.inside
        # A scale that has come down to 1 is a scale all the same: PA203 tells of that.
        by_scaler = scaled or any(self._noted(loss) is not None for loss in losses)
        by_scaler |= self._used and self._session and self._stepping
        self._used |= by_scaler
        self._scaled_now |= by_scaler
        self._pending = scaled and not self._apart
        self._backward_scale = (self.scale or 1.0) if scaled else 1.0

    def unscaled_backward(self, place: Line, low: set[torch.dtype], now: set[torch.dtype]) -> Finding | None:
        """PA107: float16 products, and no scale on the loss."""
        self._low_half |= torch.float16 in low
        scaled, self._scaled_now = self._scaled_now, False
        half, self._half_unscaled = self._half_unscaled or torch.float16 in now, False
        if self._apex.inside or self._watch.scaled_by_hand or torch.float16 not in low:
            return None
        if self._used and (scaled or not half):
            return None
        why = "a GradScaler was made and scale() is not called" if self._made else "nothing scales the loss"
        why = "a loss scale is used elsewhere, and not here" if self._used else why
        cure = None
        if self._session and not self._used:
            why, cure = "the session was prepared without a loss scale", SCALED_SESSION
        elif any(one.policy.compute is torch.float16 for one in self.sessions):
            cure = SESSION_BACKWARD
        return never_scaled(why, _spelt(self._made), cure, place)

    def before_step(self, optimizer: Optimizer, place: Line) -> None:
        """PA107: a step taken outside of the scaler with gradients that are still scaled."""
        if self._stepping or self._apex.inside or self._session:
            return
        factor = self._gradients.scaled_by_hand(optimizer) if self._low_half and not self._used else None
        own = [p for group in optimizer.param_groups for p in group["params"]]
        if self._pending:
            self._pending = False
            if self._gradients.any_scaled(own) or not self._gradients.some_scaled:  # or it steps copies
                self._gradients.stepped(optimizer)
                self._watch.tell(left_out(self.scale, optimizer, place))
        elif factor is not None and is_well_known(optimizer):  # another may divide by it inside
            self._watch.tell(never_taken_off(factor, optimizer, place))

    def _about_to_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Of every optimizer, also of the second one of a backward pass; a closure brings gradients of its own."""
        if self._stepping or self._apex.inside or self._session or len(args) > 1 or kwargs.get("closure"):
            return
        own = [p for group in optimizer.param_groups for p in group["params"]]
        if self._watch.bad and self._made and self._gradients.all_true(own):
            self._watch.tell(unguarded(optimizer, users_line()))
        elif self._gradients.any_scaled(own):
            self._gradients.stepped(optimizer)
            self._watch.tell(left_out(self.scale, optimizer, users_line()))
        else:
            self._look_for_mixed(optimizer)

    def _clip(self, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        self._watch.gradients_are_true()
        clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        parameters = clipped  # it may have been a generator
        if not self._stepping and self._still_scaled(clipped):
            fix = APEX_CLIP if self._apex.inside else "session.clip_grad_norm_(max_norm)" if self._session else None
            self._watch.tell(clipped_scaled(getattr(original, "__name__", "clipping"), self.scale, users_line(), fix))
        self._stepping, before = True, self._stepping
        try:
            return original(parameters, *args, **kwargs)
        finally:
            self._stepping = before

    def _still_scaled(self, parameters: list[Tensor]) -> bool:
        """Whether gradients are about to be clipped that still are scaled."""
        if self._apex.inside or self._session:
            return self._pending
        return self._gradients.any_scaled(parameters) or (self._pending and not self._gradients.all_true(parameters))

    def _schedule(self, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(scheduler, "_is_initial", False) and self._watch.step:
            self._schedules += 1
            self._schedule_place = users_line()
        return original(scheduler, *args, **kwargs)

    def since_last(self) -> dict[str, Any]:
        """Events since the last attempt to step."""
        facts = {
            "schedules": self._schedules, "updates": self._updates, "schedule_at": _spelt(self._schedule_place),
            "loss_at": _spelt(self._loss_place),
        }  # fmt: skip
        self._schedules = self._updates = 0
        return facts

    def counts(self) -> dict[str, Any]:
        """For the last record."""
        return {**self.since_last(), "scaler_at": _spelt(self._made)}


def _as_it_is(original: Any, *args: Any) -> Any:
    return original(*args)


def _spelt(place: Line | None) -> str | None:
    return None if place is None or place[0] is None else f"{place[0]}:{place[1]}"
