"""One processor (SM) of an H100 or H200 that runs block after block of a kernel: when each warp issues, and what waits.

The model. Four partitions issue one instruction a cycle each, of the warp that has been ready longest. A warp is ready
when the stall count of its last instruction is over and the scoreboards are free that the next one waits for, both as
the compiler wrote them into the code. A unit that takes an instruction is busy for some cycles. Device memory is a
server: bytes pass at this processor's share of the bandwidth that copying attains, loads and stores alike and in the
order they came, and a load then takes a latency, the same with or without load but for a spread. As many blocks are
resident as registers, shared memory and places for warps allow; a new one comes when one has ended.

What it leaves out: misses and limits of the L2 cache and its ways, the switch of DRAM between reading and writing (the
attained bandwidth of copying has it on the average), the instruction cache, conflicts of register banks, the beginning
and end of a launch, a clock that is not the nominal one, and that programs of one launch differ. It shows whether a
kernel is bound by instructions, by latency or by memory, and how far it is from the next bound; it is no measurement.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from .block import Event

PARTITIONS = 4
WARPS, BLOCKS, REGISTERS, SHARED = 64, 32, 65536, 233472
"""Places for warps and blocks, registers, and bytes of shared memory of an SM of compute capability 9.0: CUDA C++
Programming Guide, technical specifications per compute capability."""
BLOCK_SHARED = 1024
"""Bytes of shared memory that the system takes for each block: same place."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU."""

    name: str
    bandwidth: float
    """Bytes a second that copying device memory attains. Assumed: about 90 % of what NVIDIA's data sheets promise."""
    processors: int = 132
    """NVIDIA H100 data sheet, SXM; the H200 is the same chip."""
    clock: float = 1.755e9
    """Hertz. Assumed: the boost clock that copying sustains on an SXM board is somewhere near."""

    @property
    def share(self) -> float:
        """Bytes a cycle for one processor."""
        return self.bandwidth / self.processors / self.clock


DEVICES = (Device("H100", 3.0e12), Device("H200", 4.3e12))
LATENCIES = (650, 850)
"""Cycles from a load to its data from device memory that is busy. Assumed; both ends are simulated. Idle memory was
measured to take about 480 on an H100 PCIe, its L2 cache 260, L1 40, shared memory 29 (Luo, Fan, Li, Du, Wang, Chu
2024: Benchmarking and dissecting the NVIDIA Hopper GPU architecture via microbenchmarking)."""
SPREAD = 0.12
"""By which share a latency differs from its mean, at most, evenly. Assumed."""
L2, L1 = 270, 40
"""Cycles. Tables are taken to be in the L2 cache, the numbers of a step in L1, and what only this program reads of the
plan in neither."""
LAUNCH = 300
"""Cycles from a block's end to the first instruction of the next one in its place. Assumed."""
BARRIER = 12
"""Cycles from the last arrival to the next instruction. Assumed."""

_CACHED = {"scalars": L1, "factor": L1, "table": L2, "sizes": L2, "ratios": L2, "below": L2, "shared": 29}
_OTHERS = {"MUFU": 24, "F2F": 24, "F2I": 24, "SHFL": 25, "REDUX": 25, "LDC": 30, "ULDC": 30, "S2R": 25, "S2UR": 25,
           "CS2R": 25, "R2UR": 15, "FCHK": 16}  # fmt: skip
"""Cycles until the result is there, of instructions that tell it by a scoreboard. Assumed; not much depends on them."""

MEMORY = "memory"
"""The path to L1 and shared memory, 128 bytes a cycle, which the partitions share; the other units they have each."""
_UNITS = {
    "fma": (1, ("FADD", "FMUL", "FFMA", "FSWZADD", "HADD2", "HFMA2", "HMUL2")),
    "whole": (2, ("IMAD",)),
    "special": (8, ("MUFU", "F2F", "F2I", "REDUX")),
    "double": (2, ("DADD", "DMUL", "DFMA", "DSETP")),
    MEMORY: (1, ("LDG", "STG", "LDS", "STS", "SHFL")),
    "none": (0, ("BAR", "BRA", "BSSY", "BSYNC", "CALL", "RET", "EXIT", "NOP", "S2R", "CS2R", "LDC", "WARPSYNC")),
}
UNIT = {name: (unit, cycles) for unit, (cycles, names) in _UNITS.items() for name in names}
"""By instruction the unit and for how many cycles a warp takes it: 32 lanes over what a quarter of a processor does in
a cycle (CUDA C++ Programming Guide, throughput of native arithmetic instructions, 9.0)."""
_ALL_OTHERS = ("integer", 2)
"""Additions, shifts, comparisons and logic of 32-bit integers, selection, conversion: 16 lanes a cycle."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a processor does in the long run."""

    cycles: float
    """For a block, on the average; blocks overlap, so a block by itself takes longer."""
    moved: float
    """Bytes of a block between device memory and the processor."""
    issued: float
    """Instructions a cycle, of at most four."""


@dataclass(slots=True, eq=False)
class _Block:
    left: int
    waiting: list[_Warp] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Warp:
    block: _Block
    steps: list[_Step]
    partition: int
    age: int
    at: int = 0
    ready: float = 0.0
    scoreboards: list[float] = field(default_factory=lambda: [0.0] * 6)


@dataclass(frozen=True, slots=True)
class _Step:
    """An instruction as the simulation needs it."""

    unit: str
    busy: int
    streams: float | None
    """Bytes that wait in the queue of device memory: 0 for a load of what another one is fetching already."""
    latency: float
    """Cycles until the result is there."""
    varies: bool
    barrier: bool
    stall: int
    write: int | None
    read: int | None
    waits: tuple[int, ...]


def resident(registers: int, shared: int, warps: int) -> int:
    """How many blocks of so many warps a processor holds. `registers`: of a thread, given in eights."""
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    return min(by_registers, WARPS // warps, BLOCKS, SHARED // (shared + BLOCK_SHARED))


def simulate(
    traces: Sequence[Sequence[Event]], slots: int, device: Device, latency: float, *, rounds: int = 6
) -> Result:
    """Run blocks of warps that issue `traces`, `slots` at a time, each place so often; the first two do not count."""
    rows = {event.region for trace in traces for event in trace if event.region.startswith("row")}
    steps = [[_step(event, latency, rows) for event in trace] for trace in traces]
    run = _Run(steps, device.share, slots)
    while run.ended < 2 * slots:
        run.issue()
    begin, issued, last = run.time, run.issued, run.ended + rounds * slots
    while run.ended < last:
        run.issue()
    blocks = (run.issued - issued) / sum(map(len, traces))  # and not those that ended, which do so in waves
    moved = sum(step.streams or 0.0 for trace in steps for step in trace)
    return Result((run.time - begin) / blocks, moved, (run.issued - issued) / (run.time - begin))


def _step(event: Event, latency: float, rows: set[str]) -> _Step:
    one = event.instruction
    unit, busy = UNIT.get(one.kind, ("uniform", 2) if one.kind.startswith("U") else _ALL_OTHERS)
    streams, takes, varies = None, float(_OTHERS.get(one.kind, 0)), False
    if not event.carried_out:
        unit, busy, takes = "none", 0, 0.0
    elif event.region:
        busy = event.passes
        streams = float(event.moved) if event.region in rows else None
        varies = event.region not in _CACHED
        takes = latency if varies else _CACHED[event.region]
        if one.kind in ("STG", "STS"):
            takes, varies = 20.0, False
    return _Step(unit, busy, streams, takes, varies, one.kind == "BAR" and event.carried_out, max(1, one.stall),
                 one.write, one.read, one.waits)  # fmt: skip


class _Run:
    """The state of a processor."""

    def __init__(self, steps: list[list[_Step]], share: float, slots: int) -> None:
        self.steps, self.share = steps, share
        self.queue: list[tuple[float, int, _Warp]] = []
        """Warps by the time from which on they may issue; of equal ones, the oldest first."""
        self.free: dict[tuple[int, str], float] = {}
        """By partition and unit, from when on it takes an instruction; the partition's issue slot is a unit, too."""
        self.memory = 0.0
        """When device memory has passed all that was asked of it."""
        self.time, self.ended, self.issued = 0.0, 0, 0
        self.ages, self.chance = itertools.count(), random.Random(0)
        for slot in range(slots):
            self.start(100.0 * slot)  # blocks of a launch do not begin in the same cycle

    def start(self, time: float) -> None:
        """A new block."""
        block = _Block(len(self.steps))
        for number, steps in enumerate(self.steps):
            age = next(self.ages)
            warp = _Warp(block, steps, (age if len(self.steps) % PARTITIONS else number) % PARTITIONS, age, ready=time)
            heapq.heappush(self.queue, (time, age, warp))

    def issue(self) -> None:
        """Issue the next instruction, or see that its unit is busy."""
        self.time, _, warp = heapq.heappop(self.queue)
        now, step = self.time, warp.steps[warp.at]
        partition = -1 if step.unit == MEMORY else warp.partition
        slot, unit = (warp.partition, "issue"), (partition, step.unit)
        possible = max(self.free.get(slot, 0.0), self.free.get(unit, 0.0) if step.busy else 0.0)
        if possible > now:
            heapq.heappush(self.queue, (possible, warp.age, warp))
            return
        self.issued += 1
        self.free[slot] = now + 1
        if step.busy:
            self.free[unit] = now + step.busy
        done = now + step.latency * (1 + SPREAD * self.chance.uniform(-1, 1) if step.varies else 1)
        if step.streams is not None:
            self.memory = max(self.memory, now) + step.streams / self.share
            done += self.memory - now
        if step.write is not None:
            warp.scoreboards[step.write] = max(warp.scoreboards[step.write], done)
        if step.read is not None:
            warp.scoreboards[step.read] = max(warp.scoreboards[step.read], now + 10)
        warp.at += 1
        warp.ready = now + step.stall
        self.go_on(warp, step.barrier)

    def go_on(self, warp: _Warp, barrier: bool) -> None:
        """Put a warp where it waits: for its next instruction, at a barrier, or nowhere."""
        block = warp.block
        if warp.at == len(warp.steps):
            block.left -= 1
            if not block.left:
                self.ended += 1
                self.start(self.time + LAUNCH)
        elif barrier:
            block.waiting.append(warp)
        else:
            self.push(warp)
        if block.waiting and len(block.waiting) == block.left:
            for one in block.waiting:
                one.ready = self.time + BARRIER
                self.push(one)
            block.waiting.clear()

    def push(self, warp: _Warp) -> None:
        """Have a warp wait for its scoreboards."""
        waits = warp.steps[warp.at].waits
        heapq.heappush(self.queue, (max([warp.ready, *(warp.scoreboards[i] for i in waits)]), warp.age, warp))
