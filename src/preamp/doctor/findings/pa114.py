"""PA114: values that count, in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator

from ...report import Finding
from ...report.finding import Severity
from ..shadow.facts import Absorbed, Fact
from .check import Check, on
from .pa212 import IN_VAIN, in_float32


class PA114(Check):
    """Positions, indices, times and frequencies beyond what 16 bits tell apart, and counters that stand still."""

    untried = "# compute positions, times and indices in float32 or in whole numbers; cast the result"

    def told(self, fact: Fact) -> tuple[Severity, str]:
        """An angle or an index of a number that 16 bits have rounded."""
        share = f"{fact.error:.0%} of the entries differ" if fact.kind == "decided" else f"off by {fact.error:.0%}"
        return "error" if fact.kind == "decided" else "warning", (
            f"{fact.name} of numbers up to {fact.largest:.4g} that went through 16 bits: {share} from float32's, and "
            f"what went in is right to {fact.inputs:.2%}"
        )

    @on(Absorbed)
    def counter(self, event: Absorbed) -> Iterator[Finding]:
        """A count that stands still."""
        if not event.counts or (event.stayed < event.moved and event.in_vain < IN_VAIN):
            return
        name = event.buffer or "the counter"
        stops = 512 if event.dtype == "bf16" else 4096
        yield self.finding(
            "error",
            f"{name} is {event.dtype} and no longer counts: {event.by:g} is added and it stays what it is, as every "
            f"count does in {event.dtype} before it reaches {stops} times that",
            in_float32(event) or "# count in whole numbers, which no cast touches: torch.zeros((), dtype=torch.long)",
            module=event.module,
            op=event.op,
            at=event.at,
            evidence={"adds": event.by, "dtype": event.dtype},
        )
