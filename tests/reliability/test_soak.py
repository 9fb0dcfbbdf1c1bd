"""A long run with overflows at random steps: no memory grows.

The criterion for memory: the median of a quantity over the last third of the run must not exceed its median over the
middle third by more than the noise that the middle third itself has (the distance between its 5th and 95th percentile)
and a floor: 20 objects of Python's, 2 MiB of resident memory. A leak of one object a step, or of 100 bytes a step over
20,000 steps (2 MiB), moves the medians by more than that; what torch, the allocator and the tests' own lists do at the
start lies in the first third, which is not looked at.
"""

from __future__ import annotations

import gc
import os
import statistics
from pathlib import Path

import pytest

import preamp

from .runs import OPTIMIZERS, Run, seeded


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def grows(samples: list[int], floor: int) -> str:
    """What the criterion above says against `samples`; "" if nothing."""
    third = len(samples) // 3
    middle, late = samples[third : 2 * third], samples[2 * third :]
    cuts = statistics.quantiles(middle, n=20)
    noise = max(cuts[-1] - cuts[0], floor)
    rise = statistics.median(late) - statistics.median(middle)
    return f"the median rose by {rise:.0f}, noise is {noise:.0f}" if rise > noise else ""


def soak(level: str, kind: str, steps: int) -> None:
    scale = preamp.DynamicScale(2.0**12, growth_interval=37, min_scale=2.0**6, max_scale=2.0**14)
    run, chance = Run(level, kind, scale=scale), seeded(f"soak {level} {kind}")
    objects: list[int] = []
    memory: list[int] = []
    every, planted = steps // 60, 0
    for index in range(steps):
        bad = chance.random() < 1 / 30
        planted += bad
        assert run.step(index % 50, factor=float("inf") if bad else 1.0).skipped is bad, index
        if index % every == 0:
            gc.collect()
            objects.append(len(gc.get_objects()))
            memory.append(resident())
    assert run.session.steps == steps and run.session.skipped == planted > steps / 100
    assert not (said := grows(objects, 20)), f"Python's objects: {said}"
    assert not (said := grows(memory, 2 << 20)), f"resident memory: {said}"


def test_the_criterion_sees_a_leak_and_forgives_noise() -> None:
    chance = seeded("criterion")
    still = [10_000 + chance.randrange(50) for _ in range(300)]
    assert not grows(still, 20)
    assert grows([value + 5 * index for index, value in enumerate(still)], 20)  # an object a step, sampled every 5th
    assert not grows([10**8 + (1 << 20) * chance.randrange(2) for _ in range(300)], 2 << 20)
    assert grows([10**8 + 100 * 67 * 5 * index for index in range(300)], 2 << 20)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("steps", [1_500, 20_000])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_soak(level: str, kind: str, steps: int) -> None:
    soak(level, kind, steps)
