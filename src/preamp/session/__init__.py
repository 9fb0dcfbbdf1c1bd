"""A training run under a policy."""

from ._prepare import prepare
from ._report import StepReport
from ._scaler import SessionScaler
from ._session import Session

__all__ = ["Session", "SessionScaler", "StepReport", "prepare"]
