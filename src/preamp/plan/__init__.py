"""Says what a training run will hold and send, in bytes a rank, before anything is allocated."""

from ._plan import MemoryPlan, plan
from ._shapes import count_of

__all__ = ["MemoryPlan", "count_of", "plan"]
