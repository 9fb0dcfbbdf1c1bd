"""Gradients cleared in every way that scripts have, parameters of two dtypes, infinities put into either."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from preamp.compat.apex import amp
from preamp.compat.apex.optimizers import FusedSGD

from .toys import scaled_backward

OPTIMIZERS: dict[str, Any] = {
    "SGD": torch.optim.SGD,
    "FusedSGD": FusedSGD,
    "FusedSGD, no master gradients": lambda p, **k: FusedSGD(p, materialize_master_grads=False, **k),
}


class TwoDtypes(nn.Module):
    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self.full = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.low = nn.Parameter(torch.tensor([2.0, 3.0], dtype=low))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.full * self.low.float()).sum()


def made(make: Any, low: torch.dtype) -> tuple[TwoDtypes, Any]:
    model = TwoDtypes(low)
    groups = [{"params": [model.full]}, {"params": [model.low], "lr": 0.5}]
    return model, make(groups, lr=0.25, momentum=0.125)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("clear", ["to None", "by the model", "by the optimizer"])
@pytest.mark.parametrize("infinity", [None, (1, "full"), (2, "full"), (1, "low"), (2, "low")])
def test_steps_are_those_of_float32(kind: str, level: str, clear: str, infinity: tuple[int, str] | None) -> None:
    checked = level in ("O1", "O2")
    reference, plain = made(torch.optim.SGD, torch.float32)
    amp._amp_state.allow_incoming_model_not_fp32 = True
    model, optimizer = made(OPTIMIZERS[kind], torch.float16)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, cast_model_type=False)
    scaler = amp._amp_state.loss_scalers[0]
    if checked:
        scaler._loss_scale = 4.0
    x = torch.full((2,), 2.0**-6)
    for i in range(4):
        plain.zero_grad()
        reference(x).backward()
        if not (checked and infinity and infinity[0] == i):
            plain.step()
        if clear == "to None":
            for parameter in model.parameters():
                parameter.grad = None
        elif clear == "by the model":
            model.zero_grad()
        else:
            optimizer.zero_grad()
        with amp.scale_loss(model(x), optimizer) as scaled:
            scaled.backward()
            if checked and infinity and infinity[0] == i:
                getattr(model, infinity[1]).grad[0] = math.inf
        optimizer.step()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.float(), theirs, rtol=2e-3, atol=2e-3)
    if checked:
        assert scaler.loss_scale() == (4.0 if infinity is None else 2.0)


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_lbfgs_where_there_are_no_masters(level: str) -> None:
    """Its closure runs forward and backward inside step(), once for every point that it tries."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=128.0 if level == "O1" else None)
    x = torch.randn(32, 4)
    y = x.sum(1, keepdim=True)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        scaled_backward(loss, optimizer)
        return loss.detach()

    first = float(closure())
    for _ in range(4):
        last = float(optimizer.step(closure))
    assert last < first / 100
