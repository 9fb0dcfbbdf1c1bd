"""Carries out the SASS of one block of threads, to learn which instructions its warps issue and what memory they touch.

Branches are followed by their predicates, and loops as often as they run, because all 32 lanes of a warp compute with
real numbers; nothing is guessed. An instruction that is not in `integers` or `floats` is an error. Times play no part:
warps run one after the other, from barrier to barrier.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from . import floats  # noqa: F401 - files what floating-point instructions mean
from .integers import MEANINGS
from .memory import LINE, Array, Memory
from .sass import Instruction, NotUnderstood
from .warp import LANES, MASK, Warp, following

LIMIT = 20_000
"""Instructions of a warp after which a loop must be endless."""
_IDLE = frozenset({"NOP", "BSSY", "BSYNC", "WARPSYNC"})
"""Tell where lanes meet again, which they do here anyway."""


@dataclass(frozen=True, slots=True)
class Event:
    """An instruction that a warp issued."""

    instruction: Instruction
    carried_out: bool = True
    """False where the guard held for no lane."""
    region: str = ""
    """What a load or store went to: a name of `Memory`, or `shared`; empty: nothing."""
    moved: int = 0
    """Bytes in sectors of device memory that this block had not loaded, or stored, before."""
    passes: int = 1
    """Cycles for which it takes the path to the L1 cache and shared memory."""


def run_block(code: dict[int, Instruction], memory: Memory, arguments: bytes, warps: int) -> list[list[Event]]:
    """What each of `warps` warps of block 0 issues, in order. `arguments`: of the kernel, as they lie in memory."""
    traces: list[list[Event]] = [[] for _ in range(warps)]
    runs = [_run(code, memory, Warp(arguments, number), trace) for number, trace in enumerate(traces)]
    with np.errstate(all="ignore"):
        while runs:
            runs = [run for run in runs if next(run, "ended") != "ended"]
    return traces


def _run(code: dict[int, Instruction], memory: Memory, warp: Warp, trace: list[Event]) -> Iterator[None]:
    """Run a warp to its end; pauses at each barrier."""
    order = list(code.values())
    numbers = {instruction.place: number for number, instruction in enumerate(order)}
    at = np.zeros(LANES, np.int64)  # where each lane is; those behind go first, and so they meet again
    while len(trace) < LIMIT:
        number = int(at.min())
        if number == len(order):
            return
        instruction, here = order[number], at == number
        at[here] += 1
        warp.running = here & warp.predicate(instruction.guard or "PT")
        kind = instruction.kind
        if not warp.running.any():
            trace.append(Event(instruction, carried_out=False))
            continue
        trace.append(_access(instruction, memory, warp) if kind in _ACCESSES else Event(instruction))
        if kind == "EXIT":
            at[warp.running] = len(order)
        elif kind == "BAR":
            if (at < len(order)).sum() != warp.running.sum():
                raise NotUnderstood(f"some lanes of a warp are not at the barrier at {instruction.place:#x}")
            yield
        elif kind in ("BRA", "CALL", "RET"):
            goes, target = _jump(instruction, warp)
            at[goes] = numbers[target]
        elif kind not in _ACCESSES and kind not in _IDLE:
            _compute(instruction, warp)
    raise NotUnderstood(f"a warp issued {LIMIT} instructions and did not end")


def _compute(instruction: Instruction, warp: Warp) -> None:
    kind, *modifiers = instruction.name.split(".")
    meaning = MEANINGS.get(kind)
    if meaning is None:
        raise NotUnderstood(f"{instruction.name} at {instruction.place:#x} has no meaning in benchmarks/simulation yet")
    meaning(warp, tuple(modifiers), tuple(operand.removesuffix(".reuse") for operand in instruction.operands))


def _jump(instruction: Instruction, warp: Warp) -> tuple[Array, int]:
    """The lanes that take a branch, call or return, and where it leads."""
    *conditions, target = instruction.operands
    goes = warp.running
    for condition in conditions:
        goes = goes & warp.predicate(condition)
    if instruction.kind == "RET":
        register, offset = target.split()
        return goes, int(warp.bits(register)[warp.running][0]) + int(offset, 16)
    return goes, int(target, 16)


_ACCESSES = frozenset({"LDG", "STG", "LDS", "STS"})


def _access(instruction: Instruction, memory: Memory, warp: Warp) -> Event:
    """Load or store."""
    stores = instruction.kind.startswith("ST")
    width = _width(instruction.name)
    place, register = instruction.operands if stores else instruction.operands[::-1]
    registers = [following(register.removesuffix(".reuse"), i) for i in range(-(-width // 4))]
    lanes = np.flatnonzero(warp.running)
    addresses = _addresses(place, warp)[lanes]
    if (addresses % np.uint64(width)).any():
        raise NotUnderstood(f"the address at {instruction.place:#x} is not a multiple of {width}")
    if instruction.kind.endswith("G"):
        region, stored, places = memory.at(addresses, width)
        lines = np.unique(addresses // np.uint64(LINE))
        moved, passes = memory.new_bytes(stores, addresses, width), max(len(lines), width * len(lanes) // LINE)
    else:
        region, stored = "shared", memory.shared
        places = (addresses & MASK).astype(np.int64)[:, None] + np.arange(width)
        words = np.unique(places // 4)  # of which each of 32 banks gives one a cycle
        moved, passes = 0, int(np.bincount(words % 32).max())
    if stores:
        values = np.stack([warp.bits(name)[lanes] for name in registers], 1)
        stored[places] = values.view(np.uint8)[:, :width]
    else:
        loaded = np.zeros((len(warp.running), 4 * len(registers)), np.uint8)
        loaded[lanes, :width] = stored[places]
        for name, values in zip(registers, loaded.view(np.uint32).T, strict=True):
            warp.set_bits(name, values.copy())
    return Event(instruction, True, region, moved, passes)


def _width(name: str) -> int:
    """Bytes that a load or store moves for each lane."""
    if ".S8" in name or ".S16" in name:
        raise NotUnderstood(f"{name} extends signs")
    return next((width for part, width in ((".128", 16), (".64", 8), (".U16", 2), (".U8", 1)) if part in name), 4)


def _addresses(operand: str, warp: Warp) -> Array:
    """What stands between the last brackets: registers and a number, uint64 of each lane."""
    found = np.zeros(len(warp.running), np.uint64)
    for part in re.findall(r"\[([^][]*)\]", operand)[-1].split("+"):
        name, _, size = part.partition(".")
        if part.startswith("-"):
            found = found - np.uint64(-int(part, 16))
        else:
            found = found + (warp.pair(name) if size == "64" else warp.bits(name).astype(np.uint64))
    return found
