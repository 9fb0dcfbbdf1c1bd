"""A training run under a policy."""

from ._memory import Memory, MemoryRow, memory_of
from ._prepare import masters_for, prepare, sessions_of
from ._report import StepReport
from ._scaler import SessionScaler
from ._session import Session

__all__ = [
    "Memory", "MemoryRow", "Session", "SessionScaler", "StepReport", "masters_for", "memory_of", "prepare",
    "sessions_of",
]  # fmt: skip
