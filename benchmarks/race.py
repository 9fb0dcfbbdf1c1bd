"""Timing that survives a busy machine: contenders take turns, and each round gives a ratio."""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import torch

from preamp.autocast import PRODUCTS, REGISTRY, VMAPPED
from preamp.machine import seconds_now

from .harness import Setting

Step = Callable[[], Any]


@dataclass(eq=False)
class Entry:
    """A contender of a race. One that fails keeps the error, gives up what it holds, and has no further turns.

    `make` makes what is timed, and pushes on the stack what has to be closed. `turn` is around each of its turns, of
    `before` calls off the clock, since others' turns leave cold caches, and `number` on it.
    """

    name: str
    make: Callable[[ExitStack], Step]
    turn: Callable[[], AbstractContextManager[object]] = nullcontext
    before: int = 0
    number: int = 1
    found: dict[str, Any] = field(default_factory=dict)  # what else was measured
    seconds: list[float] = field(default_factory=list)  # a call's, by round
    error: str | None = None
    step: Step = lambda: None
    held: ExitStack = field(default_factory=ExitStack)

    def begin(self, warm: int = 2) -> None:
        """Make it, and call it a few times off the clock."""
        self.step = self.make(self.held)
        for _ in range(warm):
            self.step()

    @contextmanager
    def attempt(self, setting: Setting) -> Iterator[None]:
        """A turn of its own; whatever goes wrong inside is its error."""
        try:
            with self.turn():
                yield
        except Exception as error:
            self.error = setting.failed(self.name, error)
        if self.error:
            self.close()

    def close(self) -> None:
        """Give up everything that holds memory."""
        self.held.close()
        self.step = lambda: None
        free_memory()

    def result(self, reference: Entry) -> dict[str, Any]:
        """Statistics and all samples."""
        if self.error:
            return {"name": self.name, "error": self.error, **self.found}
        stats = {"median": statistics.median(self.seconds), "rounds": len(self.seconds)}
        ratios = [theirs / own for theirs, own in zip(reference.seconds, self.seconds, strict=not reference.error)]
        ratio = None if reference.error else spread(ratios)
        return {"name": self.name, "stats": stats, "seconds": self.seconds, "ratio": ratio, **self.found}


def race(
    entries: Sequence[Entry], setting: Setting, begin: Callable[[Entry], None] = Entry.begin
) -> list[dict[str, Any]]:
    """Time contenders in `setting.rounds` rounds; the first one is the reference of the ratios.

    Rounds go through `orders`, so that what one contender leaves in the caches favours no other.
    """
    collecting = gc.isenabled()
    try:
        for entry in entries:
            with entry.attempt(setting):
                begin(entry)
        gc.disable()
        for order in islice(cycle(orders(len(entries))), setting.rounds):
            for entry in (entries[place] for place in order):
                if not entry.error:
                    with entry.attempt(setting):
                        for _ in range(entry.before):
                            entry.step()
                        started = seconds_now(setting.device)
                        for _ in range(entry.number):
                            entry.step()
                        entry.seconds.append((seconds_now(setting.device) - started) / entry.number)
    finally:
        if collecting:
            gc.enable()
        for entry in entries:
            entry.close()
    return [entry.result(entries[0]) for entry in entries]


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest; and `low` to `high`, which holds the true median with probability `confidence`.

    That is the narrowest interval between two of the values, as far from either end, with 95 % or more, and all of them
    if they are fewer than six: the sign test's, which asks nothing of how times are distributed.
    """
    ordered, count, taken = sorted(ratios), len(ratios), 0
    outside = 1  # of 2 ** count patterns of values below and above the median, those that leave it out on one side
    while 2 * (more := outside + math.comb(count, taken + 1)) <= 0.05 * 2**count:
        outside, taken = more, taken + 1
    return {
        "median": statistics.median(ordered), "min": ordered[0], "max": ordered[-1],
        "low": ordered[taken], "high": ordered[-1 - taken], "confidence": 1 - 2 * outside / 2**count,
    }  # fmt: skip


def orders(number: int) -> list[list[int]]:
    """Orders of `number` things, one a round, in which each follows every other equally often, and none itself.

    Williams (1949), "Experimental designs balanced for the estimation of residual effects of treatments".
    """
    if number < 3:
        return [list(range(number))]
    zigzag = [0]
    for step in range(1, number):
        zigzag.append((zigzag[-1] + (step if step % 2 else -step)) % number)
    left = [[(place + shift) % number for place in zigzag] for shift in range(number)]
    if number % 2:
        left += [order[::-1] for order in left]
    chosen = [left.pop(0)]
    while left:  # from one round to the next, too
        chosen.append(left.pop(next(i for i, order in enumerate(left) if order[0] != chosen[-1][-1])))
    return chosen


def free_memory() -> None:
    """Return freed memory to the device, for the next contender."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def keep_heap() -> bool:
    """Have the C library keep freed memory for this process, if it is glibc; returns whether it will.

    By default glibc gives large blocks back to the system and faults them in again, step after step, or not, depending
    on which small block happens to lie on top of the heap: several percent of a step, awarded at random.
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(mmap_threshold, 32 << 20) and mallopt(trim_threshold, 1 << 30))  # 32 MiB: the most it takes


@contextmanager
def without_rules() -> Iterator[None]:
    """Inside, the dispatcher has no kernels of preamp, although sessions are open."""
    rules, devices, lingering = REGISTRY.rules, list(REGISTRY._libraries), REGISTRY._lingering
    REGISTRY._clear()
    held: list[tuple[Any, set[object]]] = [(kernels, kernels._holders) for kernels in (PRODUCTS, VMAPPED)]
    for kernels, _ in held:
        kernels._holders = set()
        kernels._clear()
    try:
        yield
    finally:
        REGISTRY._clear()
        for kernels, holders in held:
            kernels._holders |= holders
            kernels.install()
        for device_type in devices:
            REGISTRY._ensure(rules, device_type)
        REGISTRY._lingering = lingering
