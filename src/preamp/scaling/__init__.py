"""Loss scaling: schedules for a session, and a GradScaler for code written for torch.amp."""

from ._grad_scaler import GradScaler, ScaleEvent
from ._schedules import (
    SCHEDULES,
    DynamicScale,
    HysteresisScale,
    LossScale,
    NoScale,
    StaticScale,
    WindowScale,
    loss_scale,
)

__all__ = [
    "SCHEDULES",
    "DynamicScale",
    "GradScaler",
    "HysteresisScale",
    "LossScale",
    "NoScale",
    "ScaleEvent",
    "StaticScale",
    "WindowScale",
    "loss_scale",
]
