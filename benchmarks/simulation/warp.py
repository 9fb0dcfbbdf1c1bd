"""The registers and predicates of a warp's 32 threads, and what operands of SASS mean."""

from __future__ import annotations

import re

import numpy as np

from .memory import Array
from .sass import NotUnderstood

LANES = 32
ARGUMENTS = 0x210
"""Where a kernel's arguments begin in constant bank 0 of sm_90."""
MASK = np.uint64(0xFFFFFFFF)
_PAIR = np.uint64(32)


class Warp:
    """Values are uint32, one of each lane; those of the uniform unit are the same in all lanes."""

    def __init__(self, arguments: bytes, number: int = 0) -> None:
        """`arguments`: of the kernel, as they lie in memory. `number`: of the warp in its block."""
        self.arguments = arguments
        lanes, zeros = np.arange(LANES, dtype=np.uint32), np.zeros(LANES, np.uint32)
        self.special = {"SR_TID.X": lanes + np.uint32(LANES * number), "SR_LANEID": lanes, "SR_CTAID.X": zeros,
                        "SR_CgaCtaId": zeros, "SRZ": zeros}  # fmt: skip
        self.registers: dict[str, Array] = {}
        self.predicates: dict[str, Array] = {}
        self.running = np.ones(LANES, bool)
        """Lanes that carry out the instruction at hand."""

    def predicate(self, name: str) -> Array:
        """A predicate of each lane."""
        plain = name.removeprefix("!")
        found = np.ones(LANES, bool) if plain in ("PT", "UPT") else self.predicates.get(plain)
        if found is None:
            raise NotUnderstood(f"predicate {plain} is read before it is written")
        return ~found if plain != name else found

    def set_predicate(self, name: str, values: Array) -> None:
        """Write a predicate of the running lanes."""
        if name not in ("PT", "UPT"):
            self.predicates[name] = np.where(self.running, values, self.predicates.get(name, False))

    def bits(self, name: str) -> Array:
        """A register, an immediate integer or a constant, without sign."""
        if name in ("RZ", "URZ", "SRZ"):
            return np.zeros(LANES, np.uint32)
        if name in self.registers:
            return self.registers[name]
        if re.fullmatch(r"-?0x[0-9a-f]+", name):
            return np.full(LANES, int(name, 16) & 0xFFFFFFFF, np.uint32)
        constant = re.fullmatch(r"c\[0x0\]\[(0x[0-9a-f]+)\]", name)
        if constant is None:
            if re.fullmatch(r"U?R\d+", name):  # a load that no lane of this warp carried out
                return np.zeros(LANES, np.uint32)
            raise NotUnderstood(f"{name} is no operand known here")
        offset = int(constant[1], 16) - ARGUMENTS  # what lies before the arguments counts as 0
        found = self.arguments[offset : offset + 4] if offset >= 0 else b""
        return np.full(LANES, int.from_bytes(found, "little"), np.uint32)

    def set_bits(self, name: str, values: Array) -> None:
        """Write a register of the running lanes; of wider integers the lower 32 bits."""
        if name in ("RZ", "URZ"):
            return
        now = values if values.dtype == np.uint32 else (values & MASK).astype(np.uint32)
        before = self.registers.get(name)
        self.registers[name] = now if before is None or self.running.all() else np.where(self.running, now, before)

    def whole(self, operand: str) -> Array:
        """An integer below 2^32, uint64; a negated one is its complement plus 1, whose carry then counts."""
        sign, name = (operand[0], operand[1:]) if operand[0] in "-~" and operand[1] in "RU" else ("", operand)
        found = self.bits(name.removesuffix(".reuse")).astype(np.uint64)
        return np.asarray((found ^ MASK) + np.uint64(sign == "-") if sign else found)

    def signed(self, operand: str) -> Array:
        """An integer from -2^31 on, int64."""
        return np.asarray((self.whole(operand) & MASK).astype(np.uint32).view(np.int32), np.int64)

    def pair(self, operand: str) -> Array:
        """Two registers as uint64."""
        low, high = (self.bits(name).astype(np.uint64) for name in (operand, following(operand)))
        return np.asarray(low | high << _PAIR)

    def set_pair(self, register: str, values: Array) -> None:
        """Write two registers from uint64."""
        self.set_bits(register, values)
        self.set_bits(following(register), values >> _PAIR)

    def number(self, operand: str, double: bool = False) -> Array:
        """A floating-point operand: float32, or float64 if `double`; a register, half of one, or an immediate."""
        plain = operand.lstrip("+-").removesuffix(".reuse")
        name, _, half = plain.strip("|").replace(".reuse", "").partition(".H")
        if name[0] in "RUc":
            if double:
                found = self.pair(name).view(np.float64)
            elif half:
                bits = self.bits(name) >> np.uint32(16 * int(half[0]))
                found = bits.astype(np.uint16).view(np.float16).astype(np.float32)
            else:
                found = self.bits(name).view(np.float32)
        else:
            value = float(name.lower().replace("qnan", "nan"))
            found = np.full(LANES, value, np.float64 if double else np.float32)
        found = np.abs(found) if plain.startswith("|") else found
        return -found if operand.startswith("-") else found

    def set_number(self, register: str, values: Array) -> None:
        """Write a float32."""
        self.set_bits(register, values.astype(np.float32).view(np.uint32))


def following(register: str, count: int = 1) -> str:
    """The register after one, or the `count`-th after it."""
    if register in ("RZ", "URZ"):
        return register
    return re.sub(r"\d+$", lambda number: str(int(number[0]) + count), register)
