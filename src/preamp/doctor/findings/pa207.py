"""PA207: one batch that is not finite by itself."""

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
