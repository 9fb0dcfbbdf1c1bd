"""Says what a training run will hold and send, in bytes a rank, before anything is allocated."""

from ._plan import MemoryPlan, plan

__all__ = ["MemoryPlan", "plan"]
