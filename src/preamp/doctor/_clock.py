"""How long the doctor itself took, and what becomes of an error of its own: nothing that the script would notice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


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
