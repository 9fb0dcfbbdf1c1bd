"""Whether a run in mixed precision is as good as the same run in full precision, told from a few seeds of each.

Losses are compared seed by seed: the two runs of a pair begin with the same weights and see the same data. The mean of
the differences has a Student t distribution with one degree of freedom less than there are pairs; the two runs are
equivalent when its 90 % interval lies within the margin (two one-sided tests at 5 %: Schuirmann, 1987).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["equivalent", "worse", "better", "undecided", "identical"]
TAIL = 0.1
"""Share of the steps at the end whose mean loss is a run's result."""
SPREADS = 2.0
"""The margin, in standard deviations of the full-precision results over seeds, unless one is given."""
LEAST = 0.005
"""The margin is never below this share of the loss."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The losses of one seed, step by step; not finite ones as they were."""

    mixed: Sequence[float]
    full: Sequence[float]


@dataclass(frozen=True, slots=True)
class Parity:
    """What the comparison says. Losses are in the script's own unit."""

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


def result(losses: Sequence[float]) -> float:
    """The mean of the last tenth of the losses; infinite when one of those is not finite, or there is none."""
    last = losses[-max(1, round(TAIL * len(losses))) :]
    return statistics.fmean(last) if last and all(map(math.isfinite, last)) else math.inf


def parity(pairs: Sequence[Pair], margin: float | None = None) -> Parity:
    """Compare pairs of runs; `margin`: the share of the full-precision loss that does not matter.

    Raises `ValueError` without a pair.
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
    half = quantile(0.95, len(pairs) - 1) * statistics.stdev(differences) / math.sqrt(len(pairs))
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


def quantile(share: float, degrees: int) -> float:
    """The Student t quantile: the t below which a share of the distribution with so many degrees of freedom lies.

    By bisection of its cumulative distribution, which for whole degrees is a finite sum (Abramowitz and Stegun,
    26.7.3 and 26.7.4).
    """
    low, high = 0.0, 1e4
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < 2 * share - 1 else (low, middle)
    return (low + high) / 2


def _within(t: float, degrees: int) -> float:
    """The share between -t and t."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + math.sin(angle) * total)
