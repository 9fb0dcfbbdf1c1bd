"""`apex.parallel` for the process groups of torch: gradients averaged over ranks, batch norm over ranks, LARC.

`DistributedDataParallel` wraps a model after `amp.initialize`; `Reducer` averages when it is told to; `SyncBatchNorm`
with `convert_syncbn_model` and `create_syncbn_process_group` normalises over the batches of all ranks; `LARC` wraps
an optimizer. Everything runs over gloo on CPU as over nccl on CUDA, and nothing has to be compiled.
"""

from __future__ import annotations

from typing import Any

import torch.distributed

from .distributed import DistributedDataParallel, Reducer
from .LARC import LARC
from .sync_batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group

ReduceOp: Any = getattr(torch.distributed, "ReduceOp", None)  # None where torch was built without distributed

__all__ = [
    "LARC", "DistributedDataParallel", "ReduceOp", "Reducer", "SyncBatchNorm", "convert_syncbn_model",
    "create_syncbn_process_group",
]  # fmt: skip
