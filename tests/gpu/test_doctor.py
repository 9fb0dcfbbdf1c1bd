"""The doctor beside a GPU, whose backward passes run in a thread of the engine's."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preamp

pytestmark = pytest.mark.gpu


def line_of(function: Any, text: str) -> int:
    """The line of a function's source that has this text."""
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


def watched(model: nn.Module, scale: float = 2.0**10) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=scale)
    with preamp.doctor.watch(model) as w:
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = model(torch.ones(8, 16, device="cuda")).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return list(w.report().findings)


def clamped() -> nn.Module:
    model = nn.Linear(16, 8).to("cuda")
    for parameter in model.parameters():
        parameter.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return model


def test_a_hook_that_bounds_scaled_gradients_is_found() -> None:
    (finding,) = [f for f in watched(clamped()) if f.code == "PA106"]
    assert finding.line == line_of(clamped, "g.clamp")
    assert finding.file and Path(finding.file).absolute() == Path(__file__)  # relative where this folder is the base


class LargeGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * torch.full_like(x, 6e4) * 100  # beyond float16


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(LargeGradient.apply(self.first(x)))


def test_an_infinity_of_a_backward_in_python_has_its_line() -> None:
    torch.manual_seed(0)
    found = [f for f in watched(Network().to("cuda")) if f.code == "PA201"]
    assert found and found[0].direction == "backward"
    assert found[0].line == line_of(Network, "LargeGradient.apply")  # where the script asks for it
