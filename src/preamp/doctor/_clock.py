"""How long the doctor itself took."""

from __future__ import annotations

import threading
import time
from typing import Any


class Clock:
    """Adds up the seconds spent inside `with clock:`; a region within another one counts once."""

    def __init__(self) -> None:
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

    def __exit__(self, *_: Any) -> None:
        self._regions.depth -= 1
        if not self._regions.depth:
            self.spent += time.perf_counter() - self._regions.begun
