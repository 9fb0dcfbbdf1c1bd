"""PA104: an operator that wants float32, in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator

from ...report import Finding
from .check import Check, on
from .events import Deviated


class PA104(Check):
    """Operators whose 16-bit result is far from float32's."""

    @on(Deviated)
    def deviated(self, event: Deviated) -> Iterator[Finding]:
        """A result that is far from float32's, of inputs that are right."""
        fact = event.fact
        if fact.code != "PA104":
            return
        off = f"loses {fact.error:.0%} of its result to zero" if fact.kind == "lost" else f"is {fact.off}"
        if fact.kind == "added up":
            yield self.of_fact(
                "warning",
                f"the rounding of {fact.name} in {fact.dtype} adds up: no result is off by more than "
                f"{fact.inputs:.0%}, and all gradients together are off by {fact.error:.0%}",
                event,
            )
            return
        if fact.op == "cumsum":
            off = f"is off by {fact.error:.2g} of the terms that it adds up"
        yield self.of_fact(
            "warning",
            f"{fact.name} in {fact.dtype} {off}, and its inputs are right to {fact.inputs:.2%}: float32 gets it right",
            event,
        )
