"""Numbers and paragraphs as people read them, and values as strict JSON takes them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar

Cell = str | int | float | bool | None
"""What a table cell may hold."""

PLAIN_BELOW = 1e6
PLAIN_FROM = 1e-4


def format_number(value: float, digits: int | None = None) -> str:
    """`value` as short plain text: fixed `digits` after the point, or four significant digits.

    A value too small or too large for that is written with an exponent, so that a non-zero number never
    reads as zero; nan and inf are written as such. Integers are written in full.

    >>> format_number(0.123456), format_number(2.5, 2), format_number(6e-8, 2), format_number(65536)
    ('0.1235', '2.50', '6.0e-8', '65536')
    """
    if isinstance(value, int):
        return str(value) if digits is None or digits <= 0 else f"{value}.{'0' * digits}"
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if value == 0:
        return f"{0:.{digits or 0}f}"
    size = abs(value)
    if digits is not None:
        digits = max(digits, 0)
        vanishes = float(f"{size:.{digits}f}") == 0
        return scientific(value, 1) if vanishes or size >= 1e9 else f"{value:.{digits}f}"
    if not PLAIN_FROM <= size < PLAIN_BELOW:
        return scientific(value, 3)
    decimals = max(0, 3 - math.floor(math.log10(size)))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_left(seconds: float) -> str:
    """How long something will still take, in words; of two or more of a unit, no smaller one is told.

    >>> format_left(0.2), format_left(100), format_left(230)
    ('about 1 s left', 'about 100 s left', 'about 4 min left')
    """
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"about {seconds / size:.0f} {unit} left"
    return f"about {max(seconds, 1):.0f} s left"


def scientific(value: float, digits: int) -> str:
    """`value` with an exponent and without the padding that Python gives it: 1.5e-8, not 1.500e-08."""
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    if digits > 1 and "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}"


def format_cell(value: Cell, digits: int | None = None) -> str:
    """A table cell as one line of text: None is "-", a bool is "yes" or "no"."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return format_number(value, digits)
    return " ".join(value.split())


def plain_text(value: Any) -> str:
    """A piece of evidence, or of what is known of a machine, as text."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return format_cell(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(plain_text(item) for item in value)
    return str(value)


def paragraphs(text: str) -> list[str]:
    """`text` cut at blank lines, each paragraph on one line."""
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]


def as_float(value: Any) -> float | None:
    """`value` as a finite float, or None for what no chart can show (None, nan, inf, beyond float)."""
    if value is None:
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """The exponential average of `values` so far, at each of them; the first ones weigh no more than the others."""
    found, average = [], 0.0
    for index, value in enumerate(values, 1):
        average = weight * average + (1 - weight) * value
        found.append(average / (1 - weight**index))
    return found


def to_json(value: Any) -> Any:
    """`value` in the types of strict JSON: `json.dumps(..., allow_nan=False)` takes the result.

    nan and inf become null, keys become text, sets are sorted by their text, arrays and tensors become lists, `Fields`
    their `to_dict()`, and anything unknown (a path, a dtype) becomes its text.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if value.__class__ is int:
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return [to_json(item) for item in sorted(value, key=str)]
    if isinstance(value, Fields):
        return value.to_dict()
    if callable(getattr(value, "tolist", None)):  # numpy and torch, without importing either
        return to_json(value.tolist())
    return str(value)


class Fields:
    """A frozen dataclass whose fields are all there is to it."""

    __slots__ = ()
    kind: ClassVar[str] = ""
    """What its dict has under "kind"; "" where its place says it."""

    def to_dict(self) -> dict[str, Any]:
        """Every field, in types that strict JSON takes."""
        plain = {each.name: to_json(getattr(self, each.name)) for each in fields(self)}  # type: ignore[arg-type]
        return {"kind": self.kind, **plain} if self.kind else plain

    def _freeze(self, *names: str) -> None:
        """Turn fields of a value under construction into tuples."""
        for name in names:
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def _freeze_points(self, *names: str) -> None:
        """Turn fields under construction into tuples of finite floats or None; a field that is None stays."""
        for name in names:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(as_float(value) for value in getattr(self, name)))
