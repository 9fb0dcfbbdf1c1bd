"""Timing that survives a busy machine: contenders take turns, and each round gives a ratio."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Outcome:
    """A contender's times (s a call, one a round), and its ratios to the reference, round by round.

    A ratio above 1 means that the contender is faster than the reference.
    """

    name: str
    seconds: tuple[float, ...]
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median of the rounds' ratios."""
        return statistics.median(self.ratios)

    def to_dict(self) -> dict[str, Any]:
        """Statistics and all samples; key names are those of pytest-benchmark's `stats`."""
        return {
            "name": self.name,
            "stats": {
                "min": min(self.seconds),
                "max": max(self.seconds),
                "mean": statistics.fmean(self.seconds),
                "stddev": statistics.stdev(self.seconds) if len(self.seconds) > 1 else 0.0,
                "median": statistics.median(self.seconds),
                "rounds": len(self.seconds),
            },
            "seconds": list(self.seconds),
            "ratio": {"median": self.ratio, "min": min(self.ratios), "max": max(self.ratios)},
        }


def race(
    contenders: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 15,
    number: int = 1,
    device: torch.device | None = None,
    on_round: Callable[[int], None] = lambda index: None,
) -> list[Outcome]:
    """Time contenders interleaved, `number` calls each a round; the first one is the reference.

    Every other round runs in reverse order, so that what one contender leaves in the caches favours nobody.
    """
    names = list(contenders)
    for name in names:  # warm up
        contenders[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for index in range(rounds):
            for name in names if index % 2 == 0 else reversed(names):
                call = contenders[name]
                started = _now(device)
                for _ in range(number):
                    call()
                times[name].append((_now(device) - started) / number)
            on_round(index)
    finally:
        if collecting:
            gc.enable()
    reference = times[names[0]]
    return [
        Outcome(name, tuple(times[name]), tuple(r / t for r, t in zip(reference, times[name], strict=True)))
        for name in names
    ]


def _now(device: torch.device | None) -> float:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
