"""The region of a session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..autocast import autocast, decorated
from ..compiling import traced_by_callers

F = TypeVar("F", bound=Callable[..., Any])


class SessionRegion(autocast):
    """A region whose rules go when the session is closed.

    `entering`: called as the region begins, but not in compiled code. `another`: makes a region like this one.
    """

    _lingers = False

    @traced_by_callers
    def __init__(
        self, device_type: str, dtype: torch.dtype | None, enabled: bool, entering: Callable[[], None],
        another: Callable[[], SessionRegion],
    ) -> None:  # fmt: skip
        super().__init__(device_type, dtype, enabled)
        self._entering, self._another = entering, another

    @traced_by_callers
    def __enter__(self) -> SessionRegion:
        if not torch.compiler.is_compiling():
            self._entering()
        super().__enter__()
        return self

    def __call__(self, func: F) -> F:
        """`func` run inside such a region; each call enters a region of its own, so recursion and threads are safe."""
        return decorated(func, self._another)
