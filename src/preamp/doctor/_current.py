"""The watch of this process: torch is wrapped once, and a second watch would see the first one's doing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._watch import Watch

_current: Watch | None = None


def current() -> Watch | None:
    """The one that is going on, if any; none in a forked child."""
    return _current if _current is not None and _current.recorder.is_own else None


def set_current(watch: Watch | None) -> None:
    """Say which one it is."""
    global _current
    _current = watch
