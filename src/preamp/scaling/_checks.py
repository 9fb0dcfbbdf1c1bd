"""What a loss scale and the parameters of a schedule may be."""

from __future__ import annotations

import math
import struct
from numbers import Real
from typing import Any

from torch import Tensor

from ..errors import ScaleError
from ..formats import FP32

SMALLEST_SCALE = FP32.smallest_normal
"""No scale is ever below this: its reciprocal is still finite in float32."""

LARGEST_SCALE = 2.0**127
"""No scale is ever above this: the largest power of two in float32."""

PATIENCE = 100
"""Skipped steps in a row after which a schedule gives up, by default."""


def _as_float(value: Any) -> float:
    """A number of Python's, of NumPy's or of a 0-d tensor; nan for what is none, inf for one beyond any float."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    try:
        return math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        return math.inf


def check_number(value: Any, name: str) -> float:
    """`value` as a float if it is a finite number, else `ScaleError`."""
    number = _as_float(value)
    if not math.isfinite(number):
        raise ScaleError(f"{name}={value!r} must be a finite number")
    return number


def check_scale(scale: Any, name: str = "scale") -> float:
    """`scale` as a float if it is a usable loss scale, else `ScaleError`."""
    number = check_number(scale, name)
    if not SMALLEST_SCALE <= number <= LARGEST_SCALE:
        raise ScaleError(
            f"{name}={scale!r}: a loss scale lies between 2**-126 and 2**127, so that the scale and its reciprocal are "
            "normal float32 numbers; beyond, unscaled gradients become infinite or zero without anybody noticing. For "
            "a scale that finds itself, which some scripts of Apex call 0, write 'dynamic'"
        )
    return number


def check_factors(growth_factor: Any, backoff_factor: Any, growth_interval: Any) -> None:
    """Raises `ScaleError` unless growth > 1, 0 < backoff < 1 and the interval is a whole number of at least 1."""
    if check_number(growth_factor, "growth_factor") <= 1:
        raise ScaleError(f"growth_factor={growth_factor!r} must be above 1, or the scale never recovers; torch uses 2")
    if not 0 < check_number(backoff_factor, "backoff_factor") < 1:
        raise ScaleError(
            f"backoff_factor={backoff_factor!r} must lie between 0 and 1, or an overflow never ends; torch uses 0.5"
        )
    check_count(growth_interval, "growth_interval", "growth_interval counts good steps before the scale grows")


def check_count(value: Any, name: str, why: str) -> int:
    """`value` as a whole number of at least 1 that a counter of 32 bits can meet, else `ScaleError`."""
    number = _as_float(value)
    if not 1 <= number < 2**31 or number % 1:
        raise ScaleError(f"{name}={value!r} must be a whole number of at least 1 and below 2**31: {why}")
    return int(number)


def check_bounds(
    init_scale: float, min_scale: float | None, max_scale: float | None, init_name: str = "init_scale"
) -> tuple[float, float]:
    """The floor and the ceiling in force (None: the limits of float32), checked against each other and the start."""
    floor = SMALLEST_SCALE if min_scale is None else check_scale(min_scale, "min_scale")
    ceiling = LARGEST_SCALE if max_scale is None else check_scale(max_scale, "max_scale")
    low, start, high = (struct.unpack("f", struct.pack("f", each))[0] for each in (floor, init_scale, ceiling))
    if not low <= start <= high:  # in float32, as scales are kept: one that was saved may be a bound, rounded
        raise ScaleError(f"{init_name}={init_scale!r} lies outside [min_scale, max_scale] = [{floor!r}, {ceiling!r}]")
    return floor, ceiling
