"""The logger "preamp": skipped steps and collapses of the scale, for runs that nobody watches.

Written where the host learns of them anyway, so that no step waits for the device because of it.
"""

from __future__ import annotations

import logging

LOG = logging.getLogger("preamp")
LOG.addHandler(logging.NullHandler())  # an application that sets up no logging sees nothing

MANY = 10
"""Skipped steps in a row that are a warning: from 2**16 a healthy start takes fewer."""


class Rows:
    """Skipped steps in a row: warns at `MANY`, and each time that their number has doubled."""

    def __init__(self) -> None:
        self._next = MANY

    def are_long(self, run: int) -> bool:
        """Whether a row of this length is to be told; `run`: 0 after a step that was taken."""
        if run < MANY:
            self._next = MANY
        if run < self._next:
            return False
        self._next = 2 * run
        return True


def tell_row(run: int, scale_stands: str, patience: int | None) -> None:
    """Warn of a row that is long. `scale_stands`: what has become of the loss scale, if there is one."""
    end = "training goes on, since patience is None" if patience is None else f"{patience} end it by ScaleCollapse"
    LOG.warning("%d steps in a row were skipped%s: %s", run, scale_stands, end)
