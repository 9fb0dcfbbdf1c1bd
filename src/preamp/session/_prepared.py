"""Which sessions a model was prepared for."""

from __future__ import annotations

import weakref

from torch import Tensor, nn
from torch.nn import Parameter

from ._session import Session

_SESSIONS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Session]] = weakref.WeakKeyDictionary()
"""The last session that each module was prepared for."""


def remember(session: Session) -> None:
    """Remember the models of a session."""
    every = (module for model in session.models.values() for module in model.modules())
    _SESSIONS.update(dict.fromkeys(every, weakref.ref(session)))


def sessions_of(*models: nn.Module) -> list[Session]:
    """The open sessions that models, or parts of them, were prepared for."""
    found = dict.fromkeys(_SESSIONS[each]() for model in models for each in model.modules() if each in _SESSIONS)
    return [session for session in found if session is not None and not session._closed]


def copies_of(model: nn.Module) -> dict[Parameter, Tensor] | None:
    """The float32 values of a model's weights, in new memory; None if it has no masters."""
    known = next((each for each in sessions_of(model) if each.policy.masters), None)
    return None if known is None else known._masters.copies(model.parameters())
