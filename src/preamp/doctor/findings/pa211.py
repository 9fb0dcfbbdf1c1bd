"""PA211: moments that cannot move."""

from __future__ import annotations

from collections.abc import Iterator

from ...report import Finding
from ..shadow.facts import Absorbed
from .check import BY_SESSION, Check, on

FROZEN = 0.5
"""Share of the second moments that a step leaves as they were, from which it is reported. In float32, or with a beta2
of 0.95, it is a few percent at the most; from half on what Adam divides by is mostly a memory of the first steps."""


class PA211(Check):
    """Second moments kept in 16 bits, of which a step leaves most as they were."""

    @on(Absorbed)
    def absorbed(self, event: Absorbed) -> Iterator[Finding]:
        """All that one step did to the second moments of an optimizer."""
        if not event.is_moment or event.stayed < FROZEN * event.moved:
            return
        share = event.stayed / event.moved
        yield self.finding(
            "warning",
            f"a step left {share:.0%} of {event.moved} second moments as they were, and in float32 they move: "
            f"{event.dtype} cannot hold changes as small as 1 - beta2 of them, so they hardly fall any more",
            "session = preamp.prepare(model.float(), optimizer, level='O5')  # masters and moments in float32\n"
            f"{BY_SESSION}\n"
            "# or preamp.optim.AdamW in place of torch.optim.AdamW",
            module=event.module,
            op=type(event.optimizer).__name__,
            at=event.at,
            step=event.step,
            evidence={"moments unchanged": round(share, 3), "dtype": event.dtype},
        )
