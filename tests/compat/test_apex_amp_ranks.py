"""amp over processes: models wrapped after initialize, in torch's wrapper or Apex's, agree on every step and skip."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from preamp.compat.apex import amp, parallel

from .ranks import Checks, agree
from .toys import batch, mlp, scaled_backward

WRAPPERS: dict[str, Any] = {
    "torch": nn.parallel.DistributedDataParallel,
    "apex": parallel.DistributedDataParallel,
    "apex delayed": partial(parallel.DistributedDataParallel, delay_allreduce=True),
}
LEVELS = ("O0", "O1", "O2", "O3", "O5")


def trained(level: str, wrapper: str, rank: int, world: int) -> None:
    """With an infinity in one rank's batch, accumulation over two passes, and clipping."""
    warnings.simplefilter("ignore")
    model = parallel.convert_syncbn_model(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    dynamic: dict[str, Any] = {"loss_scale": "dynamic"} if level in ("O1", "O2") else {}
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **dynamic)
    wrapped = WRAPPERS[wrapper](model)
    before: list[Tensor] = []
    for i in range(6):
        for half in (0, 1):
            x, y = batch(100 * i + 10 * half + rank)
            loss = nn.functional.cross_entropy(wrapped(x), y) / 2
            if i == 3 and half == 1 and rank == world - 1 and dynamic:
                loss = loss * math.inf
            scaled_backward(loss, optimizer)
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 5.0)
        before = [p.clone() for p in amp.master_params(optimizer)]
        optimizer.step()
        moved = any(not torch.equal(a, b) for a, b in zip(before, amp.master_params(optimizer), strict=True))
        assert moved == (i != 3 or not dynamic), (i, moved)
        for parameter in (*amp.master_params(optimizer), *model.parameters()):
            agree(parameter)
        optimizer.zero_grad()
    if dynamic:
        assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 4}
    amp.close()


CHECKS = Checks({f"{level} {wrapper}": partial(trained, level, wrapper) for level in LEVELS for wrapper in WRAPPERS})


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_in_processes(world: int) -> None:
    CHECKS.run(world)
