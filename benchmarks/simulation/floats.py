"""What SASS's floating-point instructions do to the registers of a warp: those that our kernels are made of.

`MUFU`, which approximates on a GPU, rounds correctly here, and `FFMA` rounds twice: the last bits may differ, which no
branch of ours depends on. Roundings other than to nearest and the double-precision approximations are not there.
"""

from __future__ import annotations

import numpy as np

from .integers import COMPARISONS, combined, means, only_one
from .memory import Array
from .sass import NotUnderstood
from .warp import LANES, Warp

_Words = tuple[str, ...]
_FINE = frozenset({"FTZ", "AND", "OR", "XOR", "MMA", "F32", "F16", "F64", "NAN", "PACK_AB"})
"""Modifiers that need no care: numbers here are not subnormal, and sums go to the nearest."""


def _only(modifiers: _Words, *allowed: str) -> None:
    for modifier in modifiers:
        if modifier not in _FINE and modifier not in allowed:
            raise NotUnderstood(f"the modifier {modifier} of a floating-point instruction")


@means("FADD")
def _add(warp: Warp, modifiers: _Words, operands: _Words) -> None:
    _only(modifiers)
    register, a, b = operands
    warp.set_number(register, warp.number(a) + warp.number(b))


@means("FMUL")
def _multiply(warp: Warp, modifiers: _Words, operands: _Words) -> None:
    _only(modifiers)
    register, a, b = operands
    warp.set_number(register, warp.number(a) * warp.number(b))


@means("FFMA")
def _multiply_and_add(warp: Warp, modifiers: _Words, operands: _Words) -> None:
    _only(modifiers)
    register, *sources = operands
    a, b, c = (warp.number(source).astype(np.float64) for source in sources)
    warp.set_number(register, a * b + c)


@means("DADD")
def _add_double(warp: Warp, modifiers: _Words, operands: _Words) -> None:
    _only(modifiers)
    register, a, b = operands
    warp.set_pair(register, (warp.number(a, double=True) + warp.number(b, double=True)).view(np.uint64))


@means("DMUL")
def _multiply_double(warp: Warp, modifiers: _Words, operands: _Words) -> None:
    _only(modifiers)
    register, a, b = operands
    warp.set_pair(register, (warp.number(a, double=True) * warp.number(b, double=True)).view(np.uint64))


@means("FSETP")
def _compare(warp: Warp, modifiers: _Words, operands: _Words) -> None:
    _set_comparison(warp, modifiers, operands, double=False)


@means("DSETP")
def _compare_double(warp: Warp, modifiers: _Words, operands: _Words) -> None:
    _set_comparison(warp, modifiers, operands, double=True)


def _set_comparison(warp: Warp, modifiers: _Words, operands: _Words, *, double: bool) -> None:
    first, second, a, b, other = operands
    only_one(second)
    _only(modifiers[1:])
    found = _compared(modifiers[0], warp.number(a, double), warp.number(b, double))
    warp.set_predicate(first, combined(warp, modifiers, found, other))


def _compared(how: str, left: Array, right: Array) -> Array:
    unordered = np.isnan(left) | np.isnan(right)
    if how in ("NAN", "NUM"):
        return unordered if how == "NAN" else ~unordered
    ordered: Array = COMPARISONS[how[:2]](left, right) & ~unordered
    return ordered | unordered if how.endswith("U") else ordered


@means("FSET")
def _comparison_as_number(warp: Warp, modifiers: _Words, operands: _Words) -> None:
    register, a, b, other = operands
    _only(modifiers, "BF", modifiers[1])
    found = _compared(modifiers[1], warp.number(a), warp.number(b))
    warp.set_number(register, combined(warp, modifiers, found, other))


@means("FSEL")
def _select(warp: Warp, modifiers: _Words, operands: _Words) -> None:
    register, a, b, which = operands
    warp.set_number(register, np.where(warp.predicate(which), warp.number(a), warp.number(b)))


@means("FMNMX")
def _extreme(warp: Warp, modifiers: _Words, operands: _Words) -> None:
    _only(modifiers)
    register, a, b, smallest = operands
    low, high = (np.minimum, np.maximum) if "NAN" in modifiers else (np.fmin, np.fmax)
    left, right = warp.number(a), warp.number(b)
    warp.set_number(register, np.where(warp.predicate(smallest), low(left, right), high(left, right)))


@means("FCHK")
def _division_is_hard(warp: Warp, modifiers: _Words, operands: _Words) -> None:
    """Whether the division of two numbers needs the long way: where an exponent is near the end of the range."""
    predicate, a, b = operands
    logs = [np.abs(np.log2(np.abs(warp.number(source)))) for source in (a, b)]
    hard = (logs[0] > 60) | (logs[1] > 60)
    if hard[warp.running].any():
        raise NotUnderstood("a division of numbers beyond 2^60 or below 2^-60: give the kernel ordinary ones")
    warp.set_predicate(predicate, hard)


@means("MUFU")
def _special(warp: Warp, modifiers: _Words, operands: _Words) -> None:
    how, value = modifiers[0], warp.number(operands[1])
    if how == "RCP":
        found = 1 / value
    elif how == "RSQ":
        found = 1 / np.sqrt(value)
    elif how == "SQRT":
        found = np.sqrt(value)
    else:
        raise NotUnderstood(f"MUFU.{how}")
    warp.set_number(operands[0], found)


@means("HADD2")
def _widen(warp: Warp, modifiers: _Words, operands: _Words) -> None:
    register, a, b = operands
    if modifiers != ("F32",) or a != "-RZ":
        raise NotUnderstood("float16 arithmetic other than widening to float32")
    warp.set_number(register, warp.number(b))


@means("HFMA2")
def _two_halves(warp: Warp, modifiers: _Words, operands: _Words) -> None:
    register, a, b, *halves = operands
    if (a, b) != ("-RZ", "RZ"):
        raise NotUnderstood("float16 arithmetic other than writing a constant")
    high, low = (int(np.float16(half).view(np.uint16)) for half in halves)
    warp.set_bits(register, np.full(LANES, high << 16 | low, np.uint32))


@means("F2FP")
def _narrow(warp: Warp, modifiers: _Words, operands: _Words) -> None:
    _only(modifiers)
    if modifiers[0] != "F16":
        raise NotUnderstood(f"F2FP.{modifiers[0]}")
    high, low = (warp.number(source).astype(np.float16).view(np.uint16).astype(np.uint32) for source in operands[1:])
    warp.set_bits(operands[0], high << np.uint32(16) | low)


@means("F2F")
def _convert(warp: Warp, modifiers: _Words, operands: _Words) -> None:
    _only(modifiers)
    register, source = operands
    if modifiers == ("F64", "F32"):
        warp.set_pair(register, warp.number(source).astype(np.float64).view(np.uint64))
    else:
        warp.set_number(register, warp.number(source, double=True))
