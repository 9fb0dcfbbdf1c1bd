"""`SessionScaler`: a session behind the interface of `torch.amp.GradScaler`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import SessionError, kind_of
from ._session import Session


def _of_schedule(name: str) -> Callable[[Any], Any]:
    """A getter of what the session's schedule has under a name."""

    def get(self: SessionScaler) -> Any:
        """That of the session's schedule; `SessionError` if it has none."""
        losses = self.session._losses.state_dict()
        fields = next(iter(losses.values()))
        if len(losses) > 1 or name not in fields:
            seen = "losses with scales of their own" if len(losses) > 1 else f"a scale of kind {fields['kind']!r}"
            raise SessionError(
                f"{name} of a SessionScaler, whose session has {seen}: see session.state_dict()['losses']"
            )
        return fields[name]

    return get


def _refused(call: str) -> Callable[..., Any]:
    """A method that is a `SessionError`."""

    def refuse(self: SessionScaler, *_: Any) -> NoReturn:
        """`SessionError`: the session's schedule has its factors."""
        raise SessionError(
            f"{call} on a SessionScaler, whose session chooses the scale: write prepare(..., scale="
            "preamp.DynamicScale(init_scale, growth_factor, backoff_factor, growth_interval)), or another schedule"
        )

    return refuse


class SessionScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`'s interface to a session, for loops and frameworks that take a scaler.

    `scale`, `unscale_`, `step` and `state_dict` are the session's, so that such a loop trains with its masters, its
    scale and its skips. The session updates its scale in `step`, and chooses it: `update` does nothing, and setting the
    scale or its factors is a `SessionError`. The loop's forward pass belongs inside `session.autocast()`.

    Args:
        session: What `preamp.prepare` returned.

    >>> session = preamp.prepare(model, optimizer, level="O2")
    >>> scaler = preamp.SessionScaler(session)
    >>> scaler.scale(loss).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    """

    def __init__(self, session: Session | None = None) -> None:
        if not isinstance(session, Session):
            given = "it was given nothing" if session is None else f"this is {kind_of(session)}"
            raise SessionError(f"SessionScaler takes what preamp.prepare(model, optimizer) returns; {given}")
        super().__init__(session.device_type, enabled=True)
        self._enabled = True  # torch switches scalers off where it sees no such device
        if len(session._losses) == 1:
            self._init_scale = session.loss_scale()
        self.session = session
        """The session that scales and steps."""

    @property
    def skipped(self) -> bool:
        """Whether the last `step` was skipped because a gradient was not finite; a host sync."""
        return self.session.last_step is not None and self.session.last_step.skipped

    def scale(self, outputs: Any) -> Any:
        """A loss times the loss scale; or several, in a list, a tuple, or any other iterable."""
        if isinstance(outputs, Tensor):
            return self.session.scale(outputs)
        if not isinstance(outputs, Iterable):
            raise ValueError(f"scale() takes a loss or an iterable of losses; this is {kind_of(outputs)}")
        scaled = map(self.scale, outputs)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled

    def unscale_(self, optimizer: Optimizer) -> None:
        """Make an optimizer's gradients true: unscaled, and float32 for parameters with masters. Idempotent."""
        self.session.unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Step an optimizer of the session, unless a gradient is not finite; then update the scale."""
        if any(argument is not None for argument in (*args, *kwargs.values())):
            raise RuntimeError(
                "step() of a scaler takes only the optimizer: a closure would run backward several times a step, and "
                "each run could overflow on its own"
            )
        self.session.step(optimizer)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Do nothing, because `step` has updated the scale. `SessionError` for a `new_scale`."""
        if new_scale is not None:
            _refused("update(new_scale)")(self)

    def get_scale(self) -> float:
        """The present loss scale; a host sync."""
        return self.session.loss_scale()

    get_growth_factor = _of_schedule("growth_factor")
    get_backoff_factor = _of_schedule("backoff_factor")
    get_growth_interval = _of_schedule("growth_interval")
    _get_growth_tracker = _of_schedule("good_steps")

    def state_dict(self) -> dict[str, Any]:
        """The session's state, masters included: with it a resumed run goes on bit for bit."""
        return self.session.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; `StateError`, with nothing changed, for the state of another scaler."""
        self.session.load_state_dict(state_dict)

    set_growth_factor = _refused("set_growth_factor()")
    set_backoff_factor = _refused("set_backoff_factor()")
    set_growth_interval = _refused("set_growth_interval()")

    def __getstate__(self) -> NoReturn:
        raise SessionError("a SessionScaler belongs to its session: save state_dict(), and make a new one")
