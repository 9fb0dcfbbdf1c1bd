"""The loss scale of one loss, where Apex has it."""

from .._scaler import LossScaler

__all__ = ["LossScaler"]
