"""PA207: one batch that is not finite by itself.

What it is. A missing measurement read as NaN, a division by zero in the preprocessing, an infinite target: the data of
one batch are not finite, or make the loss or the gradients so, whatever the precision. The finding names the step, and
where the value came in.

Why it hurts. Without a loss scale one such batch makes all weights NaN in a single step. With one the step is skipped,
the scale is halved for nothing, and the batch comes again next epoch. Often float16 gets the blame, and the script is
rewritten for another dtype in vain.

The cure. Look at the data once, before training.

When it is harmless. A NaN in the data that never reaches the loss, because it is masked or not used, is not reported.

See also: [PA201](PA201.md), when finite numbers became infinite on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...report import Finding
from .check import Check, on
from .events import BatchNotFinite


class PA207(Check):
    """What came in was not finite: bad data rather than bad precision."""

    @classmethod
    def came_in(cls, kind: str, source: str | None, where: str, **facts: Any) -> Finding:
        """An operator is the first to compute with a value that was there; `source`: in a parameter or buffer."""
        what = "an input"
        fix = (
            "assert torch.isfinite(batch).all() where the batch is made, and leave out or repair the entries that fail"
        )
        if source:
            what = f"parameter or buffer {source!r}"
            fix = f"{source!r} is already damaged: go back to a checkpoint in which it is finite"
        message = f"{what} was {kind} before any operator ran; {facts['op']} {where} is the first to compute with it"
        return cls.finding("error", message, fix, **facts)

    @on(BatchNotFinite)
    def batch(self, event: BatchNotFinite) -> Iterator[Finding]:
        """A step that was not replayed, judged by its input."""
        yield self.finding(
            "error",
            "a batch was not finite when it came in, and neither was what followed from it",
            "assert torch.isfinite(x).all()  # where batches are made; drop the entry, or mend it there",
            at=event.at,
            direction="forward",
            evidence={"entries of the batch": list(event.entries)},
        )
