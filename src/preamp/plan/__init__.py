"""Computes what a training run will hold and send: bytes a rank, by kind, before anything is allocated.

p = preamp.plan.plan("7B", level="O5", world=64, shard="fsdp2")
print(p.to_table().to_text())                        # what is held, what comes on top in a step, what is sent
p.total, p.peak, p.sent, p.bytes_of("states")        # bytes a rank
"""

from ._plan import MemoryPlan, plan
from ._report import plan_report
from ._rows import Row

__all__ = ["MemoryPlan", "Row", "plan", "plan_report"]
