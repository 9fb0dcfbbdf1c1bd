"""PA206: a loss that leaves the full-precision run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...report import Finding, format_number
from .check import Check

Verdict = Literal["equivalent", "worse", "better", "undecided", "identical"]
TAIL = 0.1
"""Share of the steps at the end whose mean loss is a run's result."""
SPREADS = 2.0
"""The margin, in standard deviations of the full-precision results over seeds, unless one is given."""
LEAST = 0.005
"""The margin is never below this share of the loss."""
_FIRST = (6.314, 2.920, 2.353, 2.132)
APART = 5.0
"""A difference of so many margins is an error; a smaller one beyond the margin a warning."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The losses of one seed, step by step; not finite ones as they were."""

    mixed: Sequence[float]
    full: Sequence[float]


@dataclass(frozen=True, slots=True)
class Parity:
    """What the comparison of pairs of runs says. Losses are in the script's own unit."""

    verdict: Verdict
    mixed: tuple[float, ...]
    """The result of each seed."""
    full: tuple[float, ...]
    difference: float
    """Mean of mixed - full; infinite when a mixed run came to nothing and full ones did not."""
    interval: tuple[float, float] | None
    """90 % interval of that mean; None with less than two pairs or results that are not finite."""
    margin: float
    parted: int | None
    """First step from which a pair's losses differ by more than the margin for good; None where none does."""


@dataclass(frozen=True, slots=True)
class Printed:
    """A number that the script printed under one name, of each pair of runs."""

    name: str
    mixed: tuple[float, ...]
    full: tuple[float, ...]

    @property
    def differs(self) -> bool:
        """Whether it is not finite in mixed precision alone, or is another one by more than seeds make of it."""
        if not all(map(math.isfinite, self.full)):
            return False
        if not all(map(math.isfinite, self.mixed)):
            return True
        found = parity([Pair([a], [b]) for a, b in zip(self.mixed, self.full, strict=True)])
        return found.verdict in ("worse", "better")

    def __str__(self) -> str:
        """Its name and both values."""
        mixed = next((value for value in self.mixed if not math.isfinite(value)), statistics.fmean(self.mixed))
        return f"{self.name} is {spell(mixed)} in mixed and {spell(statistics.fmean(self.full))} in full precision"


_NAMES_A_PLACE = frozenset({"PA104", "PA114", "PA115", "PA201"})
"""Findings that stand on shadows, and so name the operator by which two precisions part."""


class PA206(Check):
    """Mixed precision is worse than full precision by more than other seeds are."""

    def of(self, found: Parity, printed: Sequence[Printed] = (), seen: Sequence[Finding] = ()) -> tuple[Finding, ...]:
        """What a comparison shows; PA109 where both runs are the same.

        `printed`: numbers that differ; `seen`: what the doctor found in a run of mixed precision.
        """
        place = next((one for one in sorted(seen) if one.code in _NAMES_A_PLACE and one.severity != "info"), None)
        told = [
            self.finding(
                "warning" if all(map(math.isfinite, one.mixed)) else "error",
                f"{one}: other seeds change it by less",
                "# the line that computes it, or what it is computed from, runs in 16 bits: ask preamp doctor for it",
                evidence={"mixed": list(map(spell, one.mixed)), "full": list(map(spell, one.full))},
            )
            for one in printed
        ]
        return (*self._of_loss(found, place), *told)

    def _of_loss(self, found: Parity, place: Finding | None) -> tuple[Finding, ...]:
        if found.verdict == "identical":
            message = "the losses are the same bits in full precision: nothing here runs in 16 bits"
            fix = "with torch.autocast(x.device.type, dtype=torch.bfloat16): ..."
            return (Finding("PA109", "info", message, fix=fix),)
        if found.verdict != "worse":
            return ()
        evidence: dict[str, Any] = {
            "mixed": list(map(spell, found.mixed)),
            "full": list(map(spell, found.full)),
            "margin": spell(found.margin),
            "apart from step": found.parted,
        }
        fix = "# compare again with one part at a time in float32: with torch.autocast(device, enabled=False)"
        if place is not None:
            where = f"{place.file}:{place.line}" if place.file else place.module
            fix = f"# {place.code} at {where} says what to write: preamp doctor"
        infinite = math.isinf(found.difference)
        what = "does not end finite" if infinite else f"ends {spell(found.difference)} above full precision"
        return (
            self.finding(
                "error" if infinite or found.difference > APART * found.margin else "warning",
                f"the loss in mixed precision {what}; other seeds change it by less than {spell(found.margin)}",
                fix,
                module=None if place is None else place.module,
                step=found.parted,
                evidence=evidence,
            ),
        )


def spell(value: float) -> str:
    """A loss, in three digits."""
    return format_number(value, 3) if math.isfinite(value) else "not finite"


def result(losses: Sequence[float]) -> float:
    """The mean of the last tenth of the losses; infinite when one of those is not finite, or there is none."""
    last = losses[-max(1, round(TAIL * len(losses))) :]
    return statistics.fmean(last) if last and all(map(math.isfinite, last)) else math.inf


def parity(pairs: Sequence[Pair], margin: float | None = None) -> Parity:
    """Compare pairs of runs; `margin`: the share of the full-precision loss that does not matter.

    Losses are compared seed by seed: the two runs of a pair begin with the same weights and see the same data. The mean
    of the differences has a Student t distribution with one degree of freedom less than there are pairs; the two runs
    are equivalent when its 90 % interval lies within the margin (two one-sided tests at 5 %: Schuirmann, 1987). Raises
    `ValueError` without a pair.
    """
    if not pairs:
        raise ValueError("there is no pair of runs to compare")
    pairs = [Pair(p.mixed[: len(p.full)], p.full[: len(p.mixed)]) for p in pairs]
    mixed, full = tuple(result(p.mixed) for p in pairs), tuple(result(p.full) for p in pairs)
    room = _margin(full, margin)
    parted = min((step for p in pairs if (step := _parted(p, room)) is not None), default=None)
    if not all(map(math.isfinite, full)):
        return Parity("undecided", mixed, full, math.nan, None, room, parted)
    if not all(map(math.isfinite, mixed)):
        return Parity("worse", mixed, full, math.inf, None, room, parted)
    differences = [a - b for a, b in zip(mixed, full, strict=True)]
    mean = statistics.fmean(differences)
    if all(list(p.mixed) == list(p.full) for p in pairs):
        return Parity("identical", mixed, full, 0.0, (0.0, 0.0), room, None)
    if len(pairs) < 2:
        verdict: Verdict = "undecided"
        return Parity(verdict, mixed, full, mean, None, room, parted)
    half = quantile(len(pairs) - 1) * statistics.stdev(differences) / math.sqrt(len(pairs))
    interval = (mean - half, mean + half)
    if -room < interval[0] and interval[1] < room:
        verdict = "equivalent"
    elif interval[0] > 0 and mean > room:
        verdict = "worse"
    elif interval[1] < 0 and mean < -room:
        verdict = "better"
    else:
        verdict = "undecided"
    return Parity(verdict, mixed, full, mean, interval, room, parted)


def _margin(full: Sequence[float], margin: float | None) -> float:
    finite = [value for value in full if math.isfinite(value)]
    size = statistics.fmean(map(abs, finite)) if finite else 0.0
    if margin is not None:
        return margin * size
    spread = statistics.stdev(finite) if len(finite) > 1 else 0.0
    return max(SPREADS * spread, LEAST * size)


def _parted(pair: Pair, margin: float) -> int | None:
    found = None
    for step, (a, b) in enumerate(zip(pair.mixed, pair.full, strict=True)):
        apart = not math.isfinite(a) or abs(a - b) > margin
        found = (step if found is None else found) if apart and math.isfinite(b) else None
    return found


def quantile(degrees: int) -> float:
    """Student's t below which 95 % of the distribution with so many degrees of freedom lies.

    The first few as tables print them, the others by Fisher's expansion (Abramowitz and Stegun, 26.7.5), to 0.001.
    """
    if degrees <= len(_FIRST):
        return _FIRST[degrees - 1]
    z = statistics.NormalDist().inv_cdf(0.95)
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    found: float = sum(term / degrees**power for power, term in enumerate(terms))
    return found
