"""Whether an optimizer of a running script steps float32 copies of 16-bit parameters."""

from __future__ import annotations

import gc
from typing import Any

from torch.optim import Optimizer

from ..session import Session


def keeps_masters(optimizer: Optimizer) -> bool:
    """True for the optimizer of a session whose policy has masters, and for one that Apex initialised."""
    if hasattr(optimizer, "_amp_stash"):
        return True
    sessions: list[Any] = [one for one in gc.get_objects() if type(one) is Session]
    return any(optimizer in session.optimizers.values() and _masters(session) for session in sessions)


def _masters(session: Session) -> bool:
    return bool(session.policy.masters)
