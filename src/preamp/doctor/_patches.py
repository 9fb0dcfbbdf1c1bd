"""Functions and methods of torch replaced by ones that tell a listener, in a process that is watched as a whole."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_TORCH = str(Path(torch.__file__).resolve().parent)
_PREAMP = str(Path(__file__).resolve().parents[1])
_LIBRARY = ("site-packages", "dist-packages", "/lib/python")

Place = tuple[str | None, int | None]


class Patches:
    """Replacements that `close` takes back, the last first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Have `owner.name(*args)` call `around(original, *args)`; the name, signature and doc stay."""
        original = getattr(owner, name)
        had_own = name in vars(owner)

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, replaced)

        def undo() -> None:
            if getattr(owner, name) is replaced:
                if had_own:
                    setattr(owner, name, original)
                else:
                    delattr(owner, name)

        self._undo.append(undo)

    def on_close(self, undo: Callable[[], Any]) -> None:
        """Something else to take back."""
        self._undo.append(undo)

    def close(self) -> None:
        """Take everything back."""
        while self._undo:
            self._undo.pop()()


def users_place() -> Place:
    """File and line of the innermost frame of the user's own; of any library but torch where there is none such."""
    first: Place = (None, None)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, "<")) and (not name.startswith(_PREAMP) or name.startswith(_PREAMP + "/zoo")):
            if not any(part in name for part in _LIBRARY):
                return name, frame.f_lineno
            if first[0] is None and "site-packages" in name:
                first = (name, frame.f_lineno)
        frame = frame.f_back
    return first
