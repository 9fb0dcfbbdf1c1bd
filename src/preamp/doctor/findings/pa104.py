"""PA104: an operator that wants float32, in 16 bits."""

from __future__ import annotations

from ...report.finding import Severity
from ..shadow.facts import Fact
from .check import Check


class PA104(Check):
    """Operators whose 16-bit result is far from float32's."""

    def told(self, fact: Fact) -> tuple[Severity, str]:
        """A result that is far from float32's, of inputs that are right."""
        if fact.kind == "added up":
            return "warning", (
                f"the rounding of {fact.name} in {fact.dtype} adds up: no result is off by more than "
                f"{fact.inputs:.0%}, and all gradients together are off by {fact.error:.0%}"
            )
        off = f"loses {fact.error:.0%} of its result to zero" if fact.kind == "lost" else f"is {fact.off}"
        if fact.op == "cumsum":
            off = f"is off by {fact.error:.2g} of the terms that it adds up"
        right = f"and its inputs are right to {fact.inputs:.2%}: float32 gets it right"
        return "warning", f"{fact.name} in {fact.dtype} {off}, {right}"
