"""PA115: an operator that wants float32, fed by a 16-bit product."""

from __future__ import annotations

from ...report.finding import Severity
from ..shadow.facts import Fact
from .check import Check


class PA115(Check):
    """Factors, inverses, determinants and eigenvalues of matrices that were computed in 16 bits."""

    untried = "# compute the matrix in float32, outside of the region, from x.float()"

    def told(self, fact: Fact) -> tuple[Severity, str]:
        """A result that is far from that of the exact matrix."""
        result = f"is off by {fact.error:.0%}" if fact.error < 1 else "is wrong by more than its own size"
        if fact.kind == "not finite":
            result = "is not finite"
        return "error", (
            f"{fact.name} {result}, and in float32 throughout it is right: its matrix is right to "
            f"{fact.inputs:.2%}, as 16-bit products are, and that is not enough here"
        )
