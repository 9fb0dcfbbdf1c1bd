"""One launch over hundreds of tensors: where they lie in memory, and which program works on which piece.

A kernel gets a table of addresses and a plan that cuts every tensor into chunks, one chunk a program. Plans are kept
for each list of sizes and tables for each list of addresses, so that a step which finds its tensors where they were
uploads nothing. Nothing here needs Triton; the kernels that use it do.
"""

from ._layout import laid_out_like, same_walk, split_by_walk, turnable, walkable
from ._list import TensorList, chained, listed
from ._norms import l2_norms, norm_of_norms
from ._parts import Part, Plan, parts_of, plan_of, ready_for_capture
from ._runs import triton_runs_on
from ._shown import Shown
from ._stretches import stretches
from ._writes import count_writes

__all__ = [
    "Part", "Plan", "Shown", "TensorList", "chained", "count_writes", "l2_norms", "laid_out_like", "listed",
    "norm_of_norms", "parts_of", "plan_of", "ready_for_capture", "same_walk", "split_by_walk", "stretches",
    "triton_runs_on", "turnable", "walkable",
]  # fmt: skip
