"""Loss scaling: schedules for a session, and a GradScaler for code written for torch.amp."""

from __future__ import annotations

from ..errors import ScaleError
from ._dynamic import DynamicScale, HysteresisScale
from ._fixed import LossScale, NoScale, StaticScale
from ._grad_scaler import GradScaler, ScaleEvent
from ._skips import LOG, Run, Skips, first_nonfinite

__all__ = [
    "LOG",
    "SCHEDULES",
    "DynamicScale",
    "GradScaler",
    "HysteresisScale",
    "LossScale",
    "NoScale",
    "Run",
    "ScaleEvent",
    "Skips",
    "StaticScale",
    "first_nonfinite",
    "loss_scale",
]

SCHEDULES: dict[str, type[DynamicScale] | type[HysteresisScale]] = {
    "backoff": DynamicScale,
    "hysteresis": HysteresisScale,
}
"""The schedules by the name that `GradScaler(schedule=...)` and a policy's `scale` give them."""


def loss_scale(description: float | str | LossScale) -> LossScale:
    """The loss scale that a policy's `scale` stands for.

    "dynamic" or "backoff", "hysteresis"; 1 (none); another number, as a command line has it too; or one of yours.
    Anything else is a `ScaleError`.
    """
    if isinstance(description, LossScale):
        return description
    if isinstance(description, str):
        if schedule := SCHEDULES.get("backoff" if description == "dynamic" else description):
            return schedule()
        try:
            description = float(description)
        except ValueError:
            raise ScaleError(
                f"scale={description!r} names no schedule, and losses would go unscaled: write 'dynamic' (or "
                "'backoff'), 'hysteresis', a number, or a LossScale"
            ) from None
    return NoScale() if description == 1 else StaticScale(description)
