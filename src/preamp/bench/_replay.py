"""Replays: what a loss scale would have done over a recorded run, had it been trained in float16.

The gradients of a step are those of the trace, times the scale, rounded to float16 to nearest, ties to even (IEEE
754-2019, section 4.3.1): at 65520 and beyond infinite, at 2**-25 and below zero, below 2**-14 subnormal. A trace does
not know what another scale would have changed in the run itself, so a replay judges the scale, not the training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from ..formats import FP16
from ..kernels import Reading
from ..scaling import LossScale
from ._traces import Trace

OVERFLOW = FP16.max + 2.0**4
"""From here on magnitudes round to infinity: half a unit in the last place above the largest float16."""

_FLUSH = int(math.log2(FP16.flush_threshold))
_NORMAL = int(math.log2(FP16.smallest_normal))


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a schedule did over a trace."""

    task: str
    scales: list[float]
    """The scale in use, by step."""
    skipped: list[int]
    """The steps that were skipped."""
    flushed_entries: int
    """Non-zero gradients that became zero, over the steps not skipped."""
    nonzero_entries: int
    """Non-zero gradients of these steps."""

    @property
    def flushed(self) -> float:
        """The share of non-zero gradients that became zero, in [0, 1], over the steps not skipped; 0 without any."""
        return self.flushed_entries / self.nonzero_entries if self.nonzero_entries else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Every figure, in types that JSON takes; the scale by step as [log2 of it, for how many steps] pairs."""
        return {
            "skips": len(self.skipped),
            "skipped": self.skipped,
            "flushed": self.flushed,
            "flushed entries": self.flushed_entries,
            "non-zero entries": self.nonzero_entries,
            "log2 scale, steps": [[log2, len(list(run))] for log2, run in groupby(map(math.log2, self.scales))],
        }


def replay(trace: Trace, scale: LossScale) -> Replay:
    """Run `scale` over `trace`, from the scale it stands at; it learns, so give each replay one of its own.

    Raises `ValueError` when the scale leaves the powers of two, at which alone a trace tells what float16 flushes.
    """
    cpu = torch.device("cpu")
    scales: list[float] = []
    skipped: list[int] = []
    flushed = nonzero = 0
    present = trace.counts.sum(axis=1)
    for step in range(len(trace)):
        used = float(scale.current(cpu))
        exponent = math.log2(used)
        if not exponent.is_integer():
            raise ValueError(f"a replay knows powers of two only, and the scale of step {step} is {used!r}")
        scales.append(used)
        bad = overflows(trace, step, used)
        lost, low = below(trace, step, int(exponent))
        if bad:
            skipped.append(step)
        else:
            flushed, nonzero = flushed + lost, nonzero + int(present[step])
        scale.after_step(torch.tensor(float(bad)), _reading(trace, step, used, bad, lost, low))
    return Replay(
        task=trace.task, scales=scales, skipped=skipped, flushed_entries=flushed, nonzero_entries=nonzero
    )  # fmt: skip


def overflows(trace: Trace, step: int, scale: float) -> bool:
    """Whether a gradient, of a weight or an activation, is not finite in float16 at that scale."""
    largest = np.maximum(np.float64(trace.weights[step]), np.float64(trace.activations[step]))  # nan stays nan
    return not largest * scale < OVERFLOW


def below(trace: Trace, step: int, exponent: int) -> tuple[int, int]:
    """How many non-zero entries are zero, and how many subnormal, in float16 at the scale 2**exponent.

    The former is exact. Of the latter, those within 2**-25 of the smallest normal number round up to it, or are it,
    and are counted all the same.
    """
    counts = trace.counts[step]
    flushed, subnormal = (max(0, end - exponent - trace.first + 1) for end in (_FLUSH, _NORMAL))
    return int(counts[:flushed].sum()), int(counts[flushed:subnormal].sum())


def _reading(trace: Trace, step: int, scale: float, bad: bool, flushed: int, subnormal: int) -> Reading:
    """What `preamp.kernels.read` would find; the norm is not known, and no schedule asks for it."""
    largest = float(trace.weights[step]) * scale
    rounded = float(np.float16(largest)) if largest < OVERFLOW else math.inf
    found = torch.tensor(float(bad))
    return Reading(
        found=found,
        norm=torch.tensor(math.nan),
        nonfinite=found.bool().reshape(1),
        entries=trace.entries,
        amax=torch.tensor(rounded),
        subnormals=torch.tensor(float(subnormal)),
        zeros=torch.tensor(float(trace.zeros[step] + flushed)),
    )
