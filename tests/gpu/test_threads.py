"""Replicas in threads on one GPU, as nn.DataParallel runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.combined.runs import LOW, Net, batch, prepared


def seen(model: nn.Module, x: Tensor) -> tuple[Any, ...]:
    """dtypes of a product, of a softmax, and of the model's output, in this thread."""
    return (x @ x.mT).dtype, (x @ x.mT).softmax(-1).dtype, model(x).dtype


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_parallel_apply_with_regions_of_their_own(level: str) -> None:
    """torch's threads on one GPU: forward decorated, dtype and rules hold in each."""
    low, full = LOW[level], torch.float32
    model, x = Net().cuda(), batch(0)[0].cuda()

    class Seen(nn.Module):
        def __init__(self, region: Any) -> None:
            super().__init__()
            self.net, self.region = model, region

        def forward(self, x: Tensor) -> tuple[Any, ...]:
            return self.region(seen)(self.net, x)

    with prepared(model, level) as session:
        module = Seen(session.autocast())
        with session.autocast():
            results = torch.nn.parallel.parallel_apply([module, module], [x, x], devices=[0, 0])
    assert results == [(low, full, low)] * 2
