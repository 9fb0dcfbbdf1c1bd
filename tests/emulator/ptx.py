"""Reads PTX, which Triton's compiler makes for a GPU, into a program that the C++ beside this file runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ..pretend.building import built, loaded

NAME = "ptx_machine"
SOURCES = ("instructions.cpp", "memory.cpp", "module.cpp")

ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\)(.*?)^\{(.*?)^\}", re.DOTALL | re.MULTILINE)
SPECIAL = {"%tid.x": 0, "%ctaid.x": 1, "%nctaid.x": 2}
"""Registers that every program has, by index."""
UNWRITTEN = 0xABABABABABABABAB
"""The value of a register before it is written."""
HINTS = {"nc", "ca", "cg", "cs", "L1::evict_first", "L1::evict_last", "L1::no_allocate"}
"""Cache hints of loads and stores, which change no result."""


@cache
def native() -> Any:
    """The compiled C++; it rounds every product, as kernels launched without contraction do."""
    flags = ("-O1", "-ffp-contract=off")
    return loaded(built(NAME, Path(__file__).parent, SOURCES, "machine.h", flags=flags), NAME)


class Kernel:
    """A kernel that `run` executes on the memory of this process; `RuntimeError` for PTX that it cannot read."""

    def __init__(self, ptx: str, shared: int) -> None:
        found = ENTRY.search(ptx)
        assert found is not None, "a text of PTX has a kernel"
        self.name, parameters, about, body = found.groups()
        self._parameters = len(re.findall(r"\.param\s", parameters))
        threads = re.search(r"\.reqntid (\d+)", about)
        assert threads is not None, "Triton says how many threads a block has"
        self._program = native().Program(int(threads[1]), shared)
        self._registers = dict(SPECIAL)
        self._labels: dict[str, int] = {}
        code = []
        for text, where in statements(body):
            if text.startswith("$"):
                self._labels[text] = len(code)
            else:
                code.append((text, f"{text} ({where})"))
        self._labels["ret"] = len(code)
        for text, shown in code:
            try:
                self._add(text, shown)
            except (RuntimeError, ValueError) as error:
                raise RuntimeError(f"{error}, at: {shown}, in the kernel {self.name}") from None

    def run(self, arguments: list[int], blocks: int) -> None:
        """Execute it for `blocks` programs with these parameter bits; Triton's own parameters, at the end, are 0."""
        try:
            self._program.run([*arguments, *[0] * (self._parameters - len(arguments))], blocks)
        except RuntimeError as error:
            raise RuntimeError(f"{error}, in the kernel {self.name}") from None

    def _add(self, text: str, shown: str) -> None:
        guard, unless = -1, False
        if (guarded := re.match(r"@(!?)(%\w+)\s+(.*)", text)) is not None:
            guard, unless, text = self._register(guarded[2]), bool(guarded[1]), guarded[3]
        opcode, _, rest = text.partition(" ")
        if opcode in ("ret", "bra", "bra.uni"):
            target = self._labels["ret" if opcode == "ret" else rest.strip()]
            self._program.add_branch(target, guard, unless, shown)
            return
        opcode, outs, ins, offset = self._operands(opcode, operands(rest))
        registers = [self._register(o, out=True) for o in outs], [self._register(i) for i in ins]
        self._program.add(opcode, *registers, guard, unless, offset, shown)

    def _operands(self, opcode: str, given: list[list[str]]) -> tuple[str, list[str], list[str], int]:
        """An opcode as the C++ knows it; what it writes, what it reads, and the offset of its address."""
        kind, *details = opcode.split(".")
        if kind in ("ld", "st"):
            counts = [int(d[1]) for d in details if re.fullmatch(r"v[248]", d)] or [1]
            details = [d for d in details if d not in HINTS and not re.fullmatch(r"v[248]", d)]
            address, values = (given[0], given[1]) if kind == "st" else (given[1], given[0])
            if len(given) != 2 or len(values) != counts[0]:
                raise ValueError("a load or store with other operands than the emulator knows")
            base, offset = addressed(address[0])
            opcode = ".".join([kind, *details])
            if details[0] == "param":
                return opcode, values, [], int(base.rpartition("_")[2])
            return (opcode, values, [base], offset) if kind == "ld" else (opcode, [], [base, *values], offset)
        if kind == "ldmatrix":
            base, offset = addressed(given[1][0])
            return opcode, given[0], [base], offset
        if kind == "bar":
            return opcode, [], [name for each in given for name in each], 0
        outs, ins = given[0], [name for each in given[1:] for name in each]
        if kind == "mov" and len(outs) != len(ins):
            opcode = f"{'unpack' if len(outs) > 1 else 'pack'}.{details[-1]}"
        return opcode, outs, ins, 0

    def _register(self, name: str, out: bool = False) -> int:
        """The place of a register, or of one made for a number. What nobody asks for goes into a register `_`."""
        if name not in self._registers:
            named = re.fullmatch(r"%[a-z]+\d+", name) or (out and name == "_")
            if out and not named:
                raise ValueError(f"{name} is no register that the emulator knows")
            self._registers[name] = self._program.add_register(UNWRITTEN if named else number(name))
        return self._registers[name]


def statements(body: str) -> Iterator[tuple[str, str]]:
    """The labels and instructions of a kernel, and the line of the source that each is made from."""
    where, text = "", ""
    for line in body.splitlines():
        line, _, comment = line.partition("//")
        line = " ".join(line.split())
        if line.startswith(".loc"):
            where = comment.strip()
        elif re.fullmatch(r"\$\w+:", line):
            yield line[:-1], where
        elif line not in ("", "{", "}"):
            *whole, text = f"{text} {line}".split(";")
            yield from ((each.strip(), where) for each in whole if not each.strip().startswith("."))
    assert not text.strip(), f"an instruction without an end: {text}"


def operands(text: str) -> list[list[str]]:
    """The comma-separated operands: one name, or the names in braces."""
    found = re.findall(r"\{([^}]*)\}|(\[[^\]]*\]|[^,{}]+)", text)
    pairs = [(inside, outside.strip()) for inside, outside in found]
    return [[name.strip() for name in inside.split(",")] if inside else [one] for inside, one in pairs if inside or one]


def addressed(text: str) -> tuple[str, int]:
    """Register and offset of an address such as `[%rd1+16]`."""
    found = re.fullmatch(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\d+))?\s*\]", text)
    if found is None:
        raise ValueError(f"an address that the emulator does not know: {text}")
    return found[1], int(found[2] or 0)


def number(text: str) -> int:
    """The bits of a number as PTX writes it; `global_smem` is where the shared memory of a block begins."""
    if text == "global_smem":
        return 0
    if re.match(r"0[fdFD][0-9a-fA-F]{8}", text):
        return int(text[2:], 16)
    return int(text.rstrip("U"), 0) & 0xFFFFFFFFFFFFFFFF
