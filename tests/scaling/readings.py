"""Readings of gradients that a test makes up, and a count of what waits for the device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from preamp.gradients import Reading
from preamp.scaling import LossScale

CPU = torch.device("cpu")


def reading(amax: float, subnormals: float = 0.0, zeros: float = 0.0, entries: int = 1000) -> Reading:
    """Of scaled gradients with these figures; `amax` infinite or nan for a bad step."""
    found = torch.tensor(float(not math.isfinite(amax)))
    figures = (torch.tensor(float(x)) for x in (amax, subnormals, zeros))
    return Reading(found, torch.tensor(math.nan), found.bool().reshape(1), entries, *figures)


def feed(scale: LossScale, amax: float, *, hidden: float = 0.0, subnormals: float = 100.0) -> bool:
    """One step with a true largest gradient `amax`, and `hidden` in the activations; returns whether it was bad."""
    used = float(scale.current(CPU))
    bad = not max(amax, hidden) * used < 65520
    seen = math.inf if not amax * used < 65520 else amax * used
    scale.after_step(torch.tensor(float(bad)), reading(seen, subnormals))
    return bad


def exponent(scale: LossScale) -> float:
    return math.log2(float(scale.current(CPU)))


class Waits(TorchDispatchMode):
    """Counts what would wait for a device: values read on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.startswith(("_local_scalar_dense", "nonzero", "is_nonzero", "equal")):
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))
