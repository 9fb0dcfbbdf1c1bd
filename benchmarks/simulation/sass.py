"""Reads SASS, the instructions of a GPU's processors, as `cuobjdump -sass` prints them, with the bits that time them.

An instruction has 128 bits, which are printed as two words of 64. From bit 41 of the second one on they say what the
compiler found out about time, and the hardware obeys: how many cycles the warp waits after the instruction, which of
its six scoreboards is set until the result is there (`write`) or until the operands were read (`read`), and which
ones it waits for beforehand. Jia, Maggioni, Staiger and Scarpazza 2018 (Dissecting the NVIDIA Volta GPU architecture
via microbenchmarking, section 2.1) describe them; sm_90 has the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/$")
_SECOND = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/$")
_NONE = 7
"""The number of a scoreboard that stands for none."""


class NotUnderstood(Exception):
    """Code that the simulation cannot read, or that does what it does not follow: it says so and does not guess."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction and its control bits."""

    place: int
    """Its address in the kernel, bytes."""
    guard: str
    """The predicate under which it is carried out, as `P0` or `!P0`; empty: always."""
    name: str
    """With its modifiers, as `IADD3.X`."""
    operands: tuple[str, ...]
    stall: int
    """Cycles until the warp may issue again, 0 to 15."""
    write: int | None
    """The scoreboard that is set until the result is there."""
    read: int | None
    """The scoreboard that is set until the operands were read."""
    waits: tuple[int, ...]
    """The scoreboards that have to be free before it is issued."""

    @property
    def kind(self) -> str:
        """Its name without modifiers."""
        return self.name.partition(".")[0]


def read_sass(text: str) -> dict[int, Instruction]:
    """The instructions of the one kernel in `text`, by their addresses."""
    found: dict[int, Instruction] = {}
    lines = text.splitlines()
    if sum("Function :" in line for line in lines) > 1:
        raise NotUnderstood("there is more than one kernel in this text; disassemble them one by one")
    for number, line in enumerate(lines):
        match = _LINE.match(line)
        if match is None:
            if re.match(r"^\s+/\*[0-9a-f]{4,}\*/", line):
                raise NotUnderstood(f"line {number + 1} should be an instruction: {line.strip()}")
            continue
        second = _SECOND.match(lines[number + 1]) if number + 1 < len(lines) else None
        if second is None:
            raise NotUnderstood(f"line {number + 2} should be the second word of {line.strip()}")
        place, guard, name, operands = match.groups()
        found[int(place, 16)] = _instruction(int(place, 16), guard or "", name, operands, int(second[1], 16) >> 41)
    if not found:
        raise NotUnderstood("there is no instruction in this text; it should be what `cuobjdump -sass` prints")
    return found


def _instruction(place: int, guard: str, name: str, operands: str, control: int) -> Instruction:
    write, read, waits = control >> 5 & 7, control >> 8 & 7, control >> 11 & 63
    return Instruction(
        place, guard, name, tuple(part.strip() for part in operands.split(",")) if operands else (), control & 15,
        None if write == _NONE else write, None if read == _NONE else read,
        tuple(number for number in range(6) if waits >> number & 1),
    )  # fmt: skip
