"""PA115: an operator that wants float32, fed by a 16-bit product.

What it is. Cholesky factors, inverses, determinants and eigenvalues run in float32, and many of them take nothing else.
Where their matrix was computed in 16 bits and only then cast, its rounding is in it. The finding is such an operator
whose result is far from that of the exact matrix, although the matrix itself is right to its last bit.

Why it hurts. These operators divide by what is small in a matrix. A covariance of 16-bit numbers may have a negative
eigenvalue where the true one has 0.001: its Cholesky factor does not exist, its log-determinant is NaN, its inverse
points elsewhere.

The cure. Compute the matrix in float32: cast what it is made of, outside of the region.

When it is harmless. A matrix whose eigenvalues are all far from zero: nothing is off, and nothing is reported.

See also: [PA104](PA104.md), other operators that 16 bits spoil; [PA201](PA201.md), once something is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...report import Finding
from .check import Check, on
from .events import Deviated


class PA115(Check):
    """Factors, inverses, determinants and eigenvalues of matrices that were computed in 16 bits."""

    @on(Deviated)
    def deviated(self, event: Deviated) -> Iterator[Finding]:
        """A result that is far from that of the exact matrix."""
        fact = event.fact
        if fact.code != "PA115":
            return
        result = f"is off by {fact.error:.0%}" if fact.error < 1 else "gives something else altogether"
        if fact.kind == "not finite":
            result = "is not finite"
        yield self.of_fact(
            "error",
            f"{fact.name} {result}, and in float32 throughout it is right: its matrix is right to "
            f"{fact.inputs:.2%}, as 16-bit products are, and that is not enough here",
            event,
            "# compute the matrix in float32, outside of the region, from x.float()",
        )
