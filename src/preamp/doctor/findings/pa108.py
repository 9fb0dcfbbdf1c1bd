"""PA108: a schedule that moves on skipped steps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ...report import Finding
from ..records import Rank
from .check import Check
from .pa203 import START

MANY = 0.02
"""Share of the steps by which a schedule may run ahead."""


class PA108(Check):
    """The learning rate schedule goes on where the step was not taken."""

    def at_end(self, rank: Rank) -> Iterator[Finding]:
        """Whether a schedule moved between a skipped attempt and the next, and how often."""
        steps = rank.steps
        moved = [step for step, after in pairwise(steps) if step["skipped"] and after["schedules"]]
        if not moved:
            return
        later = [step for step in moved if step["step"] >= rank.first_taken]
        lost = max(len(moved) - START, len(later))
        many = lost > MANY * len(steps) and (len(later) > 1 or len(moved) > START)
        yield self.finding(
            "warning" if many else "info",
            f"the learning rate schedule moved on in {len(moved)} skipped steps, of {len(steps)} in all: warm-up and "
            "decay run ahead of training",
            "before = scaler.get_scale()\nscaler.step(optimizer)\nscaler.update()\n"
            "if scaler.get_scale() >= before:  # not skipped\n    scheduler.step()",
            at=tuple(moved[-1]["schedule_at"]),
            step=moved[0]["step"],
            evidence={"moved while skipped": len(moved), "at the start": len(moved) - len(later), "steps": len(steps)},
        )
