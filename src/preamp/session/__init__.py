"""A training run under a policy."""

from ._prepare import prepare
from ._report import StepReport
from ._session import Session

__all__ = ["Session", "StepReport", "prepare"]
