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
SUBNORMAL, NEARLY_ALL, ZEROS = 0.5, 0.9, 0.02
"""Where nothing can be compared: share of the gradients that are subnormal, from which as many again must be below;
enough of them, or some, if a share of all values is zero."""
FEWEST = 8
"""Values that are not zero, from which that is judged."""
FLUSHED = 1e-3
"""Share of all gradients that a good loss scale may flush; of those of one weight ten times that."""
SPARE_BITS = 2
"""Powers of two that a good loss scale leaves above the largest gradient."""
SUBNORMAL_BITS = 11
"""Powers of two between what float16 flushes and its smallest normal number."""
_USUAL = 16
"""Exponent of the scale at which torch's scaler begins."""


def scale_window(gradients: Exponents, flushed: float = 10 * FLUSHED, above: int = 0) -> tuple[int, int] | None:
    """Exponents of the smallest and the largest good loss scale for float16; None without gradients.

    The smallest flushes at most the share `flushed` of those that are not zero, and leaves the others `above` powers of
    two or more above that; the largest leaves `SPARE_BITS` above the largest gradient. The first is beyond the second
    where no scale does both.
    """
    if not gradients.largest:
        return None
    top = math.floor(math.log2(FP16.max / gradients.largest)) - SPARE_BITS
    return next((p for p in range(-24, 150) if gradients.times(2.0 ** (p - above)).flushed(FP16) <= flushed), 150), top


class PA202(Check):
    """Gradients of a layer that float16 flushed to zero: measured against float32, or told from those that are left."""

    @on(GradientsRead)
    def read(self, event: GradientsRead) -> Iterator[Finding]:
        """Each module that lost too much, by its worst parameter."""
        # Beside a matrix a vector says nothing: the gradient of a bias before a batch norm is zero but for rounding.
        with_matrix = {row.module for row in event.rows if not row.is_vector}
        rows = [row for row in event.rows if not (row.is_vector and row.module in with_matrix)]
        yield from (self._compared if event.is_exact else self._left)(rows, event.scale)

    def _compared(self, rows: list[GradientSpread], scale: float) -> Iterator[Finding]:
        """`rows`: what is exact, the worst first."""
        worst: dict[str | None, GradientSpread] = {}
        for row in rows:
            off = row.relative >= OFF and row.lost >= SOME and row.spread.largest * scale < HELD
            if row.lost >= LOST or off:
                worst.setdefault(row.module, row)
        for row in worst.values():
            evidence = {"lost": round(row.lost, 3), "without a scale": round(row.spread.flushed(FP16), 3)}
            yield self._finding(
                row,
                f"{row.lost:.0%} of the gradients of {row.name} that are not zero in float32 were flushed to zero by "
                f"float16 at a scale of {scale:g}; as a whole they are {min(row.relative, 1):.0%} off",
                {**evidence, "scale": scale, "relative error": round(row.relative, 4)},
            )

    def _left(self, rows: list[GradientSpread], scale: float) -> Iterator[Finding]:
        """What is zero in float16 may have been zero before: layers count whose other gradients are subnormal there."""
        worst: dict[str | None, tuple[float, GradientSpread]] = {}
        for row in rows:
            share, zeros = below_normal(row.spread, scale), row.spread.zeros / max(row.spread.total, 1)
            if row.spread.some >= FEWEST and share > SUBNORMAL and (zeros > ZEROS or share > NEARLY_ALL):
                worst[row.module] = max(worst.get(row.module, (0.0, row)), (share, row), key=lambda one: one[0])
        for share, row in worst.values():
            evidence = {"subnormal": round(share, 3), "largest magnitude": row.spread.largest * scale, "scale": scale}
            yield self._finding(
                row,
                f"{share:.0%} of the gradients of {row.name} that are not zero are subnormal in float16 at a scale of "
                f"{scale:g}; smaller ones are flushed to zero",
                evidence,
                above=SUBNORMAL_BITS,  # those that were flushed are not seen any more
            )
        for row in rows if worst else ():
            if not row.spread.some and not row.is_vector:
                yield self.finding(
                    "warning",
                    f"the gradient of {row.name} is zero throughout at a scale of {scale:g}, and those of other layers "
                    "are barely above what float16 holds",
                    "scaler = torch.amp.GradScaler()  # begins at 2**16 and finds the largest scale that fits",
                    module=row.module,
                    direction="backward",
                    evidence={"zero": 1.0, "scale": scale},
                )

    def _finding(self, row: GradientSpread, message: str, evidence: dict[str, float], above: int = 0) -> Finding:
        low, top = scale_window(row.spread, above=above) or (0, 0)
        low = min(low, top)
        return self.finding(
            "warning",
            message,
            f"scaler = torch.amp.GradScaler(init_scale=2.0**{min(max(_USUAL, low), top)})",
            module=row.module,
            direction="backward",
            evidence={**evidence, "scales that cure it": f"2**{low} to 2**{top}"},
        )


def below_normal(gradients: Exponents, scale: float = 1.0) -> float:
    """Share of gradients that are not zero and lie below float16's normal range at a loss scale."""
    scaled = gradients.times(scale)
    return scaled.flushed(FP16) + scaled.subnormal(FP16)


def row_of(one: GradientSpread) -> dict[str, Any]:
    """A gradient against that in float32, for the record."""
    low, top = scale_window(one.spread) or (0, 0)
    facts = {"module": one.module, "name": one.name, "lost": one.lost, "without_scale": one.spread.flushed(FP16)}
    return {**facts, "relative": one.relative, "window": (min(low, top), top), "is_vector": one.is_vector}
