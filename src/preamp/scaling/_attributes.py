"""How a scaler passes the scale and the flag to an optimizer's step: by attributes, by an argument, or not at all."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from torch.optim import Optimizer


def takes_attributes(optimizer: Optimizer) -> bool:
    """Whether a step reads `grad_scale` and `found_inf`, as torch's fused ones do, and not the older protocol."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not _takes_scaler(type(optimizer).step)


def is_watched(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step is wrapped to detect calls; a scheduler's wrapper only counts, and is no such one.

    Accelerate wraps it, and regards a step that is not called as skipped.
    """
    step = vars(optimizer).get("step")
    return step is not None and not getattr(step, "_wrapped_by_lr_sched", False)


@cache
def _takes_scaler(step: Callable[..., Any]) -> bool:
    """Whether a step has a parameter for the scaler. Cached: torch's own check takes longer than a small step."""
    return "grad_scaler" in inspect.signature(step).parameters
