"""PA103: a constant beyond the range."""

from __future__ import annotations

from collections.abc import Iterator

from ...report import Finding
from .check import Check, on
from .events import Deviated

_FIX = "torch.finfo(x.dtype).min  # instead of the constant; or float('-inf') where no row is masked whole"


class PA103(Check):
    """Constants that float16 cannot hold."""

    errors = (("without overflow", "a constant is beyond float16, whose largest number is 65504", _FIX),)

    @on(Deviated)
    def deviated(self, event: Deviated) -> Iterator[Finding]:
        """Constants that make infinities."""
        fact = event.fact
        if fact.code == "PA103":
            yield self.finding(
                "warning",
                f"the constant {fact.constant:g} is beyond float16, whose largest number is 65504, and becomes "
                "infinite here: 0 times that is NaN, and so is the softmax of a row that is masked whole",
                "x.float()  # before this line" if (fact.constant or 0) > 0 else _FIX,
                **event.where,
                evidence={"value": fact.constant, "dtype": fact.dtype},
            )
