"""What the doctor uses of preamp's sessions, masters and Apex beyond their public names: all of it is here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

from ..ledger import Masters, NoMasters
from ..policy import Policy
from ..session import Session
from ..session import _step as session_step
from .hooks import Patches


def masters_of(policy: Policy) -> Masters:
    """Who keeps the masters of a model that is converted for a trial run."""
    return Masters() if policy.masters else NoMasters()


def wrap_refused_steps(patches: Patches, around: Callable[..., Any]) -> None:
    """Have `around(original, *args)` called where a session refuses a step that went past it."""
    patches.wrap(session_step, "check_own_step", around)


def leaves_true_gradients(session: Session) -> bool:
    """Whether the session's losses have scales of their own, so that gradients are unscaled as each backward ends."""
    return session._losses.separate_scales


def keeps_masters(optimizer: Optimizer, sessions: Iterable[Session]) -> bool:
    """True for the optimizer of a session whose policy has masters, and for one that Apex initialised."""
    if hasattr(optimizer, "_amp_stash"):
        return True
    return any(optimizer in one.optimizers.values() and one.policy.masters for one in sessions)
