"""An axis: from values to places, with ticks at round numbers, for any range that floats can have."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Literal

Kind = Literal["linear", "log10", "log2", "exponent"]

_SUPERSCRIPT = str.maketrans("-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")
_NICE = ((1, Decimal("1.414")), (2, Decimal("3.162")), (5, Decimal("7.071")))
_BEYOND = 1e5  # no exponent of a float is near


@dataclass(frozen=True, slots=True)
class Tick:
    """A place on an axis in axis coordinates, and its label ("" for a minor tick)."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to axis coordinates (`transform`), and those to the drawing (`place`, `project`).

    Axis coordinates are logarithms on the log kinds, the value itself on "exponent", and on "linear" the
    value divided by `2**exponent`, so that no difference of two of them overflows or vanishes.
    """

    kind: Kind
    low: float
    high: float
    exponent: int = 0
    ticks: tuple[Tick, ...] = ()
    start: float = 0.0
    end: float = 1.0

    def transform(self, value: float | None) -> float | None:
        """`value` in axis coordinates, or None where this axis has no place for it."""
        return transform(value, self.kind, self.exponent)

    def place(self, start: float, end: float) -> Axis:
        """The same axis drawn from `start` to `end`."""
        return replace(self, start=start, end=end)

    def at(self, coordinate: float) -> float:
        """Where an axis coordinate lies in the drawing; beyond the ends it is moved to the nearer end."""
        share = (coordinate - self.low) / (self.high - self.low)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)

    def project(self, value: float | None) -> float | None:
        """Where `value` lies in the drawing, or None."""
        coordinate = self.transform(value)
        return None if coordinate is None else self.at(coordinate)


def transform(value: float | None, kind: Kind, exponent: int = 0) -> float | None:
    """`value` in the coordinates of an axis of this kind, or None where it has no place."""
    if value is None or not math.isfinite(value):
        return None
    if kind == "linear":
        try:
            return math.ldexp(value, -exponent)
        except OverflowError:  # far outside an axis of subnormals
            return math.copysign(math.inf, value)
    if kind == "exponent":
        return value if abs(value) <= _BEYOND else None
    if value <= 0:
        return None
    return math.log10(value) if kind == "log10" else math.log2(value)


def fit(
    values: Iterable[float | None], kind: Kind = "linear", *, ticks: int = 6, zero: bool = False, pad: float = 0.04
) -> Axis:
    """An axis that holds all finite `values`, with about `ticks` labels; `zero` keeps 0 on a linear one.

    `pad` is the share of the range left free at either end. A single value gets a range around it.
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if zero and kind == "linear":
        finite.append(0.0)
    exponent = 0
    if kind == "linear" and finite:
        largest = max(map(abs, finite))
        exponent = math.frexp(largest)[1] if largest else 0
    coordinates = [c for value in finite if (c := transform(value, kind, exponent)) is not None] or [0.0, 1.0]
    low, high = min(coordinates), max(coordinates)
    least = 1e-12 if kind == "linear" else 1e-9
    if high - low <= least:
        room = {"linear": 0.1 * abs(low) or 1.0, "log10": 0.5, "log2": 1.5, "exponent": 2.0}[kind]
        low, high = low - room, high + room
    else:
        room = pad * (high - low)
        held = zero and kind == "linear"
        low, high = (low if held and low == 0 else low - room), (high if held and high == 0 else high + room)
    axis = Axis(kind, low, high, exponent)
    return replace(axis, ticks=tuple(_TICKS[kind](axis, ticks)))


def _linear_ticks(axis: Axis, count: int) -> list[Tick]:
    """Ticks at multiples of 1, 2 or 5 times a power of ten."""
    factor = Decimal(2) ** axis.exponent
    values, step = _round_values(Decimal(axis.low) * factor, Decimal(axis.high) * factor, count)
    labels = _linear_labels(values, step)
    places = [float(value / factor) for value in values]
    return [Tick(at, text) for at, text in zip(places, labels, strict=True) if axis.low <= at <= axis.high]


def _round_values(low: Decimal, high: Decimal, count: int) -> tuple[list[Decimal], Decimal]:
    """The multiples of a round step between `low` and `high`, and the step."""
    raw = (high - low) / count
    power = raw.adjusted()
    lead = raw.scaleb(-power)
    # the nice step whose ratio to the raw one is nearest to 1: limits at the geometric means
    nice = next((nice for nice, limit in _NICE if lead < limit), 10)
    step = Decimal(nice).scaleb(power)
    first = int((low / step).to_integral_value(ROUND_CEILING))
    last = int((high / step).to_integral_value(ROUND_FLOOR))
    return [step * index for index in range(first, last + 1)], step


def _linear_labels(values: list[Decimal], step: Decimal) -> list[str]:
    """Labels with as many digits as the step needs, with one common exponent where the numbers are long."""
    power = step.adjusted()
    top = max((value.adjusted() for value in values if value), default=0)
    if power >= -6 and top < 6:
        return [_minus(f"{value:,.{max(0, -power)}f}") for value in values]
    shown = max(0, top - power)
    return [_minus(f"{value.scaleb(-top):.{shown}f}e{top}") if value else "0" for value in values]


def _log10_ticks(axis: Axis, count: int) -> list[Tick]:
    """Decades; 1, 2, 5 within a short range; round linear values within a very short one."""
    low, high = axis.low, axis.high
    span = high - low
    if span < 0.7:
        values, step = _round_values(Decimal(10) ** Decimal(low), Decimal(10) ** Decimal(high), count)
        values = [value for value in values if value > 0]
        pairs = zip((float(v.log10()) for v in values), _linear_labels(values, step), strict=True)
        return [Tick(at, text) for at, text in pairs if low <= at <= high]
    decades = range(math.floor(low), math.ceil(high) + 1)
    if span < 2.3:
        values = [Decimal(lead).scaleb(decade) for decade in decades for lead in (1, 2, 5)]
        ticks = [Tick(float(value.log10()), _plain(value)) for value in values]
        return [tick for tick in ticks if low <= tick.at <= high]
    step_of = next((s for s in (1, 2, 3, 5, 10, 20, 50, 100) if span / s <= count), 200)
    shown = [decade for decade in decades if low <= decade <= high]
    plain = all(-3 <= decade <= 4 for decade in shown)
    labelled = [
        Tick(float(n), _plain(Decimal(1).scaleb(n)) if plain else _power("10", n)) for n in shown if n % step_of == 0
    ]
    if step_of > 1 or span > 7:
        return labelled
    minor = [Tick(decade + math.log10(lead), "") for decade in decades for lead in range(2, 10)]
    return labelled + [tick for tick in minor if low <= tick.at <= high]


def _log2_ticks(axis: Axis, count: int) -> list[Tick]:
    """Whole powers of two, every first, second, fourth, ... of them."""
    span = axis.high - axis.low
    step = next((s for s in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if span / s <= count), 1 << 12)
    while span / step > 2 * count:
        step *= 2
    first, last = math.ceil(axis.low / step), math.floor(axis.high / step)
    shown = [index * step for index in range(first, last + 1)]
    plain = axis.kind == "log2" and all(0 <= n <= 10 for n in shown)
    return [Tick(float(n), str(2**n) if plain else _power("2", n)) for n in shown]


_TICKS = {"linear": _linear_ticks, "log10": _log10_ticks, "log2": _log2_ticks, "exponent": _log2_ticks}


def _plain(value: Decimal) -> str:
    """A power of ten, or 2 or 5 times one, as short text."""
    power = value.adjusted()
    if -4 <= power <= 5:
        return f"{value:f}" if power < 0 else f"{int(value):,}"
    return f"{value.scaleb(-power)}e{power}"


def _power(base: str, exponent: int) -> str:
    """`base` with a superscript exponent."""
    return base + str(exponent).translate(_SUPERSCRIPT)


def _minus(text: str) -> str:
    """`text` with a true minus sign, and without one on zero."""
    if not text.startswith("-"):
        return text
    return "\u2212" + text[1:] if text.strip("-0.,") else text[1:]
