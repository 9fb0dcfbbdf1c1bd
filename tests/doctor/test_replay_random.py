"""A step is done again with the numbers that the model drew, from whichever generator."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import preamp


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: float(torch.rand(()))])
@pytest.mark.parametrize("steps", [1, 20])
def test_a_layer_that_is_left_out_by_chance_is_left_out_again(draw: object, steps: int) -> None:
    """The layer that overflows runs in half of the calls, decided by a generator: only a true replay finds it."""

    class Drop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.sick = nn.Linear(4, 4), nn.Linear(4, 4)
            self.taken: list[bool] = []

        def forward(self, x: Tensor, broken: bool) -> Tensor:
            x = self.first(x)
            use = float(draw()) < 0.5  # type: ignore[operator]
            if use and broken:
                self.taken.append(True)
                x = self.sick(x).mul(1e30).exp()
            return x

    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    model = Drop()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with preamp.doctor.watch(model, every=50) as w:
        for step in range(steps + 40):
            optimizer.zero_grad()
            model(torch.ones(2, 4), step >= steps).sum().backward()
            if model.taken:
                break
            optimizer.step()
    assert model.taken == [True], "a replay leaves no trace in the model"
    (found,) = [f for f in w.findings if f.code == "PA201"]
    assert "exp" in str(found.op)
