"""PA104: an operator that wants float32, in 16 bits.

What it is. float16 keeps 11 bits of a number, bfloat16 8. From 1024 on, float16's numbers are 1 apart, and from 2048 on
2 apart, so that 2048 + 1 = 2048. Running sums, variances by E[x^2] - E[x]^2, logarithms of numbers near 1 and squares
of small ones lose what they were to measure. The finding is an operator whose result is a quarter off or more (a
running sum by a quarter of a term), or zero for the most part, although what went in is right, and which float32 gets
right from the same numbers. A difference of nearly equal numbers is reported once something divides by it, takes its
root or its logarithm, or once the gradients are off as a whole because of it.

Why it hurts. Nothing crashes. The result has a few right digits or none, and the loss settles higher than it should.

The cure. Cast before the operator; a cast after it comes too late.

When it is harmless. Sums, norms and softmax, whose kernels add up in float32 inside: their results are right to the
last bit that 16 bits have. A remainder that is only added to something larger. Neither is reported.

See also: [rules](../rules.md), which operators preamp's regions run in float32; [PA201](PA201.md), when a result is not
finite; [PA206](PA206.md), when the loss shows it.
"""

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
        off = f"loses {fact.error:.0%} of its result to zero" if fact.kind == "lost" else f"is off by {fact.error:.0%}"
        if fact.op == "cumsum":
            off = f"is off by {fact.error:.2g} of the terms that it adds up"
        yield self.of_fact(
            "warning",
            f"{fact.name} in {fact.dtype} {off}, and its inputs are right to {fact.inputs:.2%}: float32 gets it right",
            event,
            "x = x.float()  # before this line",
        )
