"""PA204: updates that rounding takes away."""

from __future__ import annotations

from collections.abc import Iterator

from ...report import Finding
from ..shadow.facts import Absorbed
from .check import BY_SESSION, Check, on

UNCHANGED = 0.5
"""Share of the numbers that would have moved in float32 and did not, from which it is reported."""

DECAY = 2e-4
"""Weight decay of one step from which it is a warning that it is lost: it takes 2 % of a weight in a hundred steps."""

LEVELS = {"fp16": "O2", "bf16": "O5"}
"""Levels with masters."""


class PA204(Check):
    """16-bit weights that an optimizer's step, or its weight decay, does not move."""

    @on(Absorbed)
    def absorbed(self, event: Absorbed) -> Iterator[Finding]:
        """One line of an optimizer's step, or the whole step of one of torch's."""
        if event.optimizer is None or not event.is_weight or event.stayed < UNCHANGED * event.moved:
            return
        share, total, dtype = event.stayed / event.moved, event.moved, event.dtype
        decay = event.op in ("mul", "div")
        what = "weight decay changes" if decay else "the update changes"
        kept = "rounds to 1" if decay else f"is less than half of what {dtype} can tell apart there"
        slight = decay and event.by is not None and abs(1 - event.by) < DECAY
        yield self.finding(
            "info" if slight else "warning",
            f"{share:.0%} of {total} {dtype} weights stay what they are where {what} them in float32: "
            f"{'a factor so near 1' if decay else 'the change'} {kept}",
            f"session = preamp.prepare(model.float(), optimizer, level={LEVELS[dtype]!r})  # float32 masters\n"
            f"{BY_SESSION}\n# or an optimizer of preamp.optim, with stochastic rounding",
            module=event.module,
            op=type(event.optimizer).__name__,
            at=event.at,
            evidence={"weights unchanged": round(share, 3), "operator": event.op, "dtype": dtype},
        )
