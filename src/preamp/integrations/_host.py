"""What all adapters share: the session of a framework's loop, from its beginning until it is closed."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, ClassVar

from ..errors import SessionError
from ..policy import policy
from ..session import Session, prepare


class Host:
    """Holds the session of a framework's loop, with `options` for `preamp.prepare`.

    An adapter says when the session begins (`_begin`) and where its framework scales, steps, saves and loads.
    """

    _not_yet: ClassVar[str]
    """What a framework has to be given before there is a session."""

    _session: Session | None = None
    _last: dict[str, Any] = {}  # noqa: RUF012 - never changed in place

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        if str(options.get("level") or "auto").strip().lower() != "auto":  # which is chosen once the device is known
            policy(options["level"])  # a name that is none is an error here, not when training begins

    @property
    def session(self) -> Session:
        """The session that trains; `SessionError` where there is none: before it begins, and after `close`."""
        if self._session is None:
            raise SessionError(f"no session now: {self._not_yet}")
        return self._session

    @property
    def is_open(self) -> bool:
        """Whether there is a session now."""
        return self._session is not None

    def close(self) -> None:
        """Close the session: models and optimizers go on in float32, and later checkpoints still have its state."""
        if self._session is not None:
            with suppress(Exception):  # of a scale that has collapsed, or a device that failed: training has raised it
                self._last = self.state_dict()
            session, self._session = self._session, None
            session.close()

    def _begin(self, models: Any, optimizers: Any) -> Session:
        scale = copy.deepcopy(self._options.get("scale"))  # a later session has another
        self._session, self._last = prepare(models, optimizers, **{**self._options, "scale": scale}), {}
        return self._session

    def _autocast(self, *_: Any, **__: Any) -> AbstractContextManager[Any]:
        """The session's region."""
        return nullcontext() if self._session is None else self._session.autocast()

    def _in_float32(self) -> AbstractContextManager[Any]:
        """The model's weights are its masters inside: to be saved, or averaged."""
        return nullcontext() if self._session is None else self._session.full_precision(values_only=True)

    def _logs(self) -> dict[str, Any]:
        """What frameworks log of a session."""
        session = self.session
        return {"loss_scale": session.loss_scale(), "skipped_steps": session.skipped}

    def state_dict(self) -> dict[str, Any]:
        """The session's state without masters, which are the model's weights in a framework's checkpoint.

        After `close` that of the session that was.
        """
        state = self._last if self._session is None else self._session.state_dict()
        return {name: value for name, value in state.items() if name != "masters"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it, also with masters; without a session there is nothing to restore."""
        if self._session is not None and state_dict:
            self._session.load_state_dict({"masters": self._session.state_dict()["masters"], **state_dict})
