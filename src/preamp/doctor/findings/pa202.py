"""PA202: gradients below what float16 holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ...formats import FP16
from ...report import Finding
from ..exponents import Exponents
from ..shadow.facts import GradientSpread, GradientsRead
from .check import Check, on

LOST = 0.25
"""Share of a weight's gradients that are flushed, from which it is reported."""
OFF, SOME, HELD = 0.1, 0.01, 2.0**-10
"""Relative error from which it is reported with less lost than that, and the least. A scaled gradient whose largest
value is beyond the third is held by float16, and off for another reason."""
FLUSHED = 1e-2
"""Share of the gradients that a good loss scale may flush."""
SPARE_BITS = 2
"""Powers of two that a good loss scale leaves above the largest gradient."""
_USUAL = 16
"""Exponent of the scale at which torch's scaler begins."""


def scale_window(gradients: Exponents) -> tuple[int, int]:
    """Exponents of the smallest and the largest good loss scale for float16; of some gradients that are not zero.

    The smallest flushes at most the share `FLUSHED` of those that are not zero; the largest leaves `SPARE_BITS` above
    the largest gradient. The first is beyond the second where no scale does both.
    """
    top = math.floor(math.log2(FP16.max / gradients.largest)) - SPARE_BITS
    return next((p for p in range(-24, 150) if gradients.times(2.0**p).flushed(FP16) <= FLUSHED), 150), top


class PA202(Check):
    """Gradients of a layer that float16 flushed to zero, beside their shadows."""

    @on(GradientsRead)
    def read(self, event: GradientsRead) -> Iterator[Finding]:
        """Each module that lost too much, by its worst parameter."""
        # Beside a matrix a vector says nothing: the gradient of a bias before a batch norm is zero but for rounding.
        with_matrix = {row.module for row in event.rows if not row.is_vector}
        worst: dict[str | None, GradientSpread] = {}
        for row in event.rows:
            off = row.relative >= OFF and row.lost >= SOME and row.spread.largest * event.scale < HELD
            if (row.lost >= LOST or off) and not (row.is_vector and row.module in with_matrix):
                worst.setdefault(row.module, row)
        for row in worst.values():
            low, top = scale_window(row.spread)
            low = min(low, top)
            best = min(max(_USUAL, low), top)
            fix = f"scaler = torch.amp.GradScaler(init_scale=2.0**{best})"
            if event.highest >= 2.0**best:
                been = f"# the loss scale has been {event.highest:g}: find what makes gradients overflow there"
                fix = f"{been} (PA201), or train in bfloat16"
            yield self.finding(
                "warning",
                f"{row.lost:.0%} of the gradients of {row.name} that are not zero in float32 were flushed to zero by "
                f"float16 at a scale of {event.scale:g}; as a whole they are {min(row.relative, 1):.0%} off",
                fix,
                module=row.module,
                direction="backward",
                evidence={
                    "lost": round(row.lost, 3),
                    "without a scale": round(row.spread.flushed(FP16), 3),
                    "scale": event.scale,
                    "relative error": round(row.relative, 4),
                    "scales that cure it": f"2**{low} to 2**{top}",
                },
            )


def row_of(one: GradientSpread) -> dict[str, Any]:
    """A gradient against that in float32, for the record."""
    facts = {"module": one.module, "name": one.name, "lost": one.lost, "without_scale": one.spread.flushed(FP16)}
    return {**facts, "relative": one.relative, "is_vector": one.is_vector}
