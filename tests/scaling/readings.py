"""Readings of gradients that a test makes up."""

from __future__ import annotations

import math

import torch

from preamp.kernels import Reading
from preamp.scaling import LossScale

CPU = torch.device("cpu")
META = torch.device("meta")
"""An accelerator that refuses every wait."""


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
