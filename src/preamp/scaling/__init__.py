"""Loss scaling: schedules for a session, and a GradScaler for code written for torch.amp."""

from ._grad_scaler import GradScaler, ScaleEvent
from ._schedules import DynamicScale, LossScale, NoScale, StaticScale, loss_scale

__all__ = ["DynamicScale", "GradScaler", "LossScale", "NoScale", "ScaleEvent", "StaticScale", "loss_scale"]
