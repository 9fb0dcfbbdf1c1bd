"""What SASS's integer instructions, moves and predicates do to the registers of a warp: those of our kernels.

Names are NVIDIA's (CUDA Binary Utilities, instruction set reference). What they mean was checked by carrying out whole
kernels and comparing what they store with torch (`tests/instruments/test_simulation.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .memory import Array
from .sass import NotUnderstood
from .warp import LANES, MASK, Warp, following

Meaning = Callable[[Warp, tuple[str, ...], tuple[str, ...]], None]
"""Gets the warp, the modifiers of the instruction (`IMAD.WIDE.U32`: WIDE and U32) and its operands."""
MEANINGS: dict[str, Meaning] = {}
"""By the instruction's name without modifiers."""


def means(*names: str) -> Callable[[Meaning], Meaning]:
    """Files a function under the names of instructions; those of the uniform unit begin with U."""

    def file(meaning: Meaning) -> Meaning:
        MEANINGS.update(dict.fromkeys(names, meaning))
        return meaning

    return file


def _split(operands: tuple[str, ...]) -> tuple[str, list[str], list[str], list[str]]:
    """The register written, predicates written, sources, and predicates read at the end."""
    register, *rest = operands
    carries = []
    while _is_predicate(rest[0]):
        carries.append(rest.pop(0))
    end = len(rest)
    while _is_predicate(rest[end - 1]):
        end -= 1
    return register, carries, rest[:end], rest[end:]


def _is_predicate(operand: str) -> bool:
    return operand.lstrip("!U").startswith("P")


def _carry(warp: Warp, names: list[str]) -> Array:
    return sum((warp.predicate(name).astype(np.uint64) for name in names), np.zeros(LANES, np.uint64))


def _set_sum(warp: Warp, register: str, carries: list[str], total: Array) -> None:
    for least, name in enumerate(carries, 1):
        warp.set_predicate(name, total >> np.uint64(32) >= least)
    warp.set_bits(register, total)


@means("MOV", "UMOV", "R2UR", "LDC", "ULDC", "CS2R", "S2R", "S2UR")
def _move(warp: Warp, modifiers: tuple[str, ...], operands: tuple[str, ...]) -> None:
    register, source = operands[:2]
    if source in warp.special:
        values = [warp.special[source]] * (1 if "32" in modifiers or source != "SRZ" else 2)
    elif source.startswith("SR_"):
        raise NotUnderstood(f"the special register {source} has no value in benchmarks/simulation yet")
    elif "64" in modifiers:
        offset = int(source[source.rindex("[") + 1 : -1], 16)
        values = [warp.bits(source), warp.bits(f"c[0x0][{offset + 4:#x}]")]
    else:
        values = [(warp.whole(source) & MASK).astype(np.uint32)]
    for value in values:
        warp.set_bits(register, value)
        register = following(register)


@means("IADD3", "UIADD3", "VIADD")
def _add(warp: Warp, modifiers: tuple[str, ...], operands: tuple[str, ...]) -> None:
    register, carries, sources, carried = _split(operands)
    total = sum((warp.whole(source) for source in sources), np.zeros(LANES, np.uint64))
    _set_sum(warp, register, carries, total + (_carry(warp, carried) if "X" in modifiers else np.uint64(0)))


@means("IMAD", "UIMAD")
def _multiply(warp: Warp, modifiers: tuple[str, ...], operands: tuple[str, ...]) -> None:
    register, carries, (a, b, c), carried = _split(operands)
    if "WIDE" in modifiers or "HI" in modifiers:
        read = warp.whole if "U32" in modifiers else warp.signed
        product = read(a).astype(np.uint64) * read(b).astype(np.uint64)
        if carries or "X" in modifiers:
            raise NotUnderstood("a 64-bit product with carry")
        if "WIDE" in modifiers:
            warp.set_pair(register, product + warp.pair(c))
        else:
            warp.set_bits(register, (product >> np.uint64(32)) + warp.whole(c) & MASK)
    else:
        total = warp.whole(a) * warp.whole(b) + warp.whole(c) + _carry(warp, carried)
        if "X" not in modifiers and carries:
            raise NotUnderstood("a product that sets a carry")
        _set_sum(warp, register, carries, total & MASK)


@means("LEA", "ULEA")
def _scaled_add(warp: Warp, modifiers: tuple[str, ...], operands: tuple[str, ...]) -> None:
    register, carries, sources, carried = _split(operands)
    shift = int(sources[-1], 16)
    low, other = warp.whole(sources[0]), warp.whole(sources[1])
    if "HI" in modifiers:
        if "SX32" in modifiers:
            wide = warp.signed(sources[0]) >> (32 - shift)
        else:
            wide = (low | warp.whole(sources[2]) << np.uint64(32)).view(np.int64) >> (32 - shift)
        scaled = wide.astype(np.uint64) & MASK
    else:
        scaled = low << np.uint64(shift) & MASK
    _set_sum(warp, register, carries, scaled + other + (_carry(warp, carried) if "X" in modifiers else np.uint64(0)))


@means("SHF", "USHF")
def _shift(warp: Warp, modifiers: tuple[str, ...], operands: tuple[str, ...]) -> None:
    register, low, amount, high = operands
    by = np.minimum(warp.whole(amount), np.uint64(63))
    way, *rest = modifiers
    both = warp.whole(low) | warp.whole(high) << np.uint64(32)
    wide = any(one.endswith("64") for one in rest)
    if way == "L":
        found = both << by if wide else warp.whole(low) << by
    elif wide:
        found = (both.view(np.int64) >> by.astype(np.int64)).astype(np.uint64) if "S64" in rest else both >> by
    elif "S32" in rest:
        found = (warp.signed(high if "HI" in rest else low) >> by.astype(np.int64)).astype(np.uint64)
    else:
        found = warp.whole(high if "HI" in rest else low) >> by
    if wide and "HI" in rest:
        found = found >> np.uint64(32)
    warp.set_bits(register, found & MASK)


def _table(values: list[Array], table: str, ones: Any) -> Array:
    """A function of three bits, bit by bit; `table` has its eight results."""
    found = values[0] & ~ones
    for row in range(8):
        if int(table, 16) >> row & 1:
            terms = [one if row >> place & 1 else one ^ ones for one, place in zip(values, (2, 1, 0), strict=True)]
            found = found | terms[0] & terms[1] & terms[2]
    return np.asarray(found)


@means("LOP3", "ULOP3")
def _logic(warp: Warp, modifiers: tuple[str, ...], operands: tuple[str, ...]) -> None:
    predicate = operands[0] if _is_predicate(operands[0]) else None
    register, *sources, table, _ = operands[predicate is not None :]
    values = [warp.whole(source).astype(np.uint32) for source in sources]
    found = _table(values, table, np.uint32(0xFFFFFFFF))
    warp.set_bits(register, found)
    if predicate:
        warp.set_predicate(predicate, found != 0)


@means("PLOP3", "UPLOP3")
def _predicate_logic(warp: Warp, modifiers: tuple[str, ...], operands: tuple[str, ...]) -> None:
    first, second, *sources, table, other = operands
    values = [warp.predicate(source) for source in sources]
    for name, rows in ((first, table), (second, other)):
        warp.set_predicate(name, _table(values, rows, np.bool_(True)))


COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "GT": np.greater, "GE": np.greater_equal, "LT": np.less, "LE": np.less_equal, "EQ": np.equal, "NE": np.not_equal,
}  # fmt: skip


def combined(warp: Warp, modifiers: tuple[str, ...], values: Array, other: str) -> Array:
    """A comparison's outcome, put together with another predicate as the instruction says."""
    with_this = warp.predicate(other)
    return values | with_this if "OR" in modifiers else values ^ with_this if "XOR" in modifiers else values & with_this


def only_one(second: str) -> None:
    """Refuse a comparison that writes its outcome's opposite, too."""
    if second not in ("PT", "UPT"):
        raise NotUnderstood("a comparison that writes two predicates")


@means("ISETP", "UISETP")
def _compare_whole(warp: Warp, modifiers: tuple[str, ...], operands: tuple[str, ...]) -> None:
    first, second, a, b, other, *below = operands
    only_one(second)
    read = warp.whole if "U32" in modifiers else warp.signed
    left, right = read(a), read(b)
    if "U32" in modifiers:
        left, right = left & MASK, right & MASK
    found = COMPARISONS[modifiers[0]](left, right)
    if "EX" in modifiers:  # of the upper halves; where they are equal, the lower ones decide
        found = np.where(left == right, warp.predicate(below[0]), found)
    warp.set_predicate(first, combined(warp, modifiers, found, other))


@means("VIMNMX", "VIMNMX3")
def _extreme(warp: Warp, modifiers: tuple[str, ...], operands: tuple[str, ...]) -> None:
    register, *sources, smallest = operands
    read = warp.whole if "U32" in modifiers else warp.signed
    values = [read(source).astype(np.int64) for source in sources]
    low, high = np.min(values, 0), np.max(values, 0)
    warp.set_bits(register, np.where(warp.predicate(smallest), low, high).astype(np.uint64))


def _extreme_of_sum(warp: Warp, modifiers: tuple[str, ...], operands: tuple[str, ...]) -> None:
    register, a, b, c, smallest = operands
    total, other = warp.signed(a) + warp.signed(b), warp.signed(c)
    found = np.where(warp.predicate(smallest), np.minimum(total, other), np.maximum(total, other))
    warp.set_bits(register, found.astype(np.uint64))


MEANINGS["VIADDMNMX"] = _extreme_of_sum


@means("SEL", "USEL")
def _select(warp: Warp, modifiers: tuple[str, ...], operands: tuple[str, ...]) -> None:
    register, a, b, which = operands
    warp.set_bits(register, np.where(warp.predicate(which), warp.whole(a), warp.whole(b)) & MASK)


@means("PRMT", "UPRMT")
def _permute(warp: Warp, modifiers: tuple[str, ...], operands: tuple[str, ...]) -> None:
    register, low, order, high = operands
    both = warp.whole(low) & MASK | (warp.whole(high) & MASK) << np.uint64(32)
    orders, found = warp.whole(order), np.zeros(LANES, np.uint64)
    for place in range(4):
        one = orders >> np.uint64(4 * place) & np.uint64(15)
        byte = both >> (np.uint64(8) * (one & np.uint64(7))) & np.uint64(255)
        byte = np.where(one & np.uint64(8), (byte >> np.uint64(7)) * np.uint64(255), byte)
        found |= byte << np.uint64(8 * place)
    warp.set_bits(register, found)


@means("SGXT")
def _cut(warp: Warp, modifiers: tuple[str, ...], operands: tuple[str, ...]) -> None:
    register, source, width = operands
    if "U32" not in modifiers:
        raise NotUnderstood("SGXT with a sign")
    warp.set_bits(register, warp.whole(source) & np.uint64(2 ** int(width, 16) - 1))


@means("IABS")
def _magnitude(warp: Warp, modifiers: tuple[str, ...], operands: tuple[str, ...]) -> None:
    warp.set_bits(operands[0], np.abs(warp.signed(operands[1])).astype(np.uint64))


@means("P2R")
def _pack_predicates(warp: Warp, modifiers: tuple[str, ...], operands: tuple[str, ...]) -> None:
    register, _, source, mask = operands
    shift = 8 * int(modifiers[0][1]) if modifiers else 0
    chosen = int(mask, 16)
    found = warp.whole(source) & ~np.uint64(chosen << shift)
    for number in range(7):
        if chosen >> number & 1 and f"P{number}" in warp.predicates:
            found = found | warp.predicates[f"P{number}"].astype(np.uint64) << np.uint64(number + shift)
    warp.set_bits(register, found)


@means("R2P")
def _unpack_predicates(warp: Warp, modifiers: tuple[str, ...], operands: tuple[str, ...]) -> None:
    _, source, mask = operands
    name, _, byte = source.partition(".B")
    bits = warp.whole(name) >> np.uint64(8 * int(byte or 0))
    for number in range(7):
        if int(mask, 16) >> number & 1:
            warp.set_predicate(f"P{number}", bits >> np.uint64(number) & np.uint64(1) == 1)


@means("SHFL")
def _exchange(warp: Warp, modifiers: tuple[str, ...], operands: tuple[str, ...]) -> None:
    inside, register, source, distance, _ = operands
    if modifiers != ("BFLY",) or inside != "PT":
        raise NotUnderstood(f"SHFL.{'.'.join(modifiers)}")
    warp.set_bits(register, warp.bits(source)[np.arange(LANES) ^ int(distance, 16)])


@means("REDUX")
def _reduce(warp: Warp, modifiers: tuple[str, ...], operands: tuple[str, ...]) -> None:
    values = warp.signed(operands[1])[warp.running]
    found = {"MAX": values.max(), "MIN": values.min(), "SUM": values.sum()}[modifiers[0]]
    warp.set_bits(operands[0], np.full(LANES, found).astype(np.uint64))
