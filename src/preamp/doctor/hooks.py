"""How a process is watched: functions of torch that are wrapped until `close`, and a clock for what that costs."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ..compiling import traced_by_callers


class Patches:
    """Replacements that `close` takes back, the last first. They do nothing while `applies()` is false."""

    def __init__(self, applies: Callable[[], bool] = lambda: True) -> None:
        self._applies = applies
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, around: Callable[..., Any], *, always: bool = False) -> None:
        """Have `owner.name(*args)` call `around(original, *args)`; the name, signature and doc stay.

        `always`: it asks by itself whether it applies.
        """
        original = getattr(owner, name)
        had_own = name in vars(owner)

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if is_traced() or not (always or self._applies()):  # what is traced must not contain our calls
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        traced_by_callers(replaced)  # and never compiled between two pieces of a function that the compiler has cut
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


def is_traced() -> bool:
    """Whether what runs is made into a program, by the compiler, export or `torch.jit.trace`, or has no numbers."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def subclasses(kind: type) -> list[type]:
    """A class and all that inherit from it, each once."""
    found: dict[type, None] = {kind: None}
    left = [kind]
    while left:
        below: list[type] = type.__subclasses__(left.pop())
        left += [one for one in below if one not in found]
        found.update(dict.fromkeys(below))
    return list(found)


class Clock:
    """Adds up the seconds spent inside `with clock:`; a region within another one counts once.

    With `failed`, an exception ends the outermost region, is handed to that function, and goes no further.
    """

    def __init__(self, failed: Callable[[Exception], None] | None = None) -> None:
        self._failed = failed
        self.spent = 0.0
        self._began = time.perf_counter()
        self._regions = threading.local()  # autograd runs hooks in threads of its own

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.perf_counter() - self._began

    def __enter__(self) -> Clock:
        depth = getattr(self._regions, "depth", 0)
        if not depth:
            self._regions.begun = time.perf_counter()
        self._regions.depth = depth + 1
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self._regions.depth -= 1
        if self._regions.depth:
            return False
        self.spent += time.perf_counter() - self._regions.begun
        if self._failed is None or not isinstance(error, Exception):
            return False
        self._failed(error)
        return True
