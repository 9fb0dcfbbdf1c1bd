"""Loss scales by name, and the names under which the rest of preamp finds them.

Each scales a loss, and learns from a step what it needs: `_fixed.py` has those that learn nothing, `_dynamic.py` those
that learn from overflows, `_window.py` the one that learns from the gradients' magnitudes.
"""

from __future__ import annotations

from ..errors import ScaleError
from ._checks import (
    LARGEST_SCALE,
    PATIENCE,
    SMALLEST_SCALE,
    check_bounds,
    check_count,
    check_factors,
    check_scale,
)
from ._dynamic import DynamicScale, HysteresisScale
from ._fixed import LossScale, NoScale, StaticScale
from ._window import WindowScale

__all__ = [
    "LARGEST_SCALE",
    "PATIENCE",
    "SCHEDULES",
    "SMALLEST_SCALE",
    "DynamicScale",
    "HysteresisScale",
    "LossScale",
    "NoScale",
    "StaticScale",
    "WindowScale",
    "check_bounds",
    "check_count",
    "check_factors",
    "check_scale",
    "loss_scale",
]

SCHEDULES: dict[str, type[DynamicScale] | type[HysteresisScale] | type[WindowScale]] = {
    "backoff": DynamicScale,
    "hysteresis": HysteresisScale,
    "window": WindowScale,
}
"""The schedules by the name that `GradScaler(schedule=...)` and a policy's `scale` give them."""


def loss_scale(description: float | str | LossScale) -> LossScale:
    """The loss scale that a policy's `scale` stands for.

    "dynamic" or "backoff", "hysteresis", "window"; 1 (none); another number; or one of yours. Anything else is a
    `ScaleError`.
    """
    if isinstance(description, LossScale):
        return description
    if isinstance(description, str):
        name = "backoff" if description == "dynamic" else description
        if name not in SCHEDULES:
            raise ScaleError(
                f"scale={description!r} names no schedule, and losses would go unscaled: write 'dynamic' (or "
                "'backoff'), 'hysteresis', 'window', a number, or a LossScale"
            )
        return SCHEDULES[name]()
    return NoScale() if description == 1 else StaticScale(description)
