"""A training run on several processes: who this one is, its part of a batch, and what all of them saw."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import PreampError
from ..sharding import rank, ranks


def join_ranks() -> int:
    """Begin a process group where torchrun has started this process; its rank, 0 elsewhere."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if cuda else "gloo")
    return rank()


def over_ranks(model: nn.Module) -> nn.Module:
    """The model as it is called in training: wrapped, where several processes train it."""
    if ranks() == 1:
        return model
    devices = [torch.cuda.current_device()] if next(model.parameters()).is_cuda else None
    return nn.parallel.DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


def own_part(batch: Any, batch_size: int) -> Any:
    """Every N-th sample of a batch, of which all ranks have equally many."""
    if batch_size % ranks():
        raise PreampError(f"a batch of {batch_size} samples cannot be shared by {ranks()} processes: take 2 or 4")
    return batch if ranks() == 1 else batch[rank() :: ranks()]


def mean_over_ranks(loss: Tensor) -> Tensor:
    """The loss of the whole batch."""
    loss = loss.detach()
    if ranks() > 1:
        loss = loss.clone()
        dist.all_reduce(loss)
        loss /= ranks()
    return loss


def any_rank(here: bool) -> bool:
    """Whether it is so on one of them: all have to stop together."""
    if ranks() == 1:
        return here
    flag = torch.tensor(float(here))
    flag = flag.cuda() if dist.get_backend() == "nccl" else flag
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)
