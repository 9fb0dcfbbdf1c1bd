"""Small networks and loops written the way scripts for Apex are."""

from __future__ import annotations

import io
import textwrap
from typing import Any

import torch
from torch import Tensor, nn

from preamp.compat.apex import amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batch(seed: int = 0, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def scaled_backward(loss: Tensor, optimizer: Any, **how: Any) -> None:
    """The backward pass as every script for Apex has it."""
    with amp.scale_loss(loss, optimizer, **how) as scaled:
        scaled.backward()


def train(model: nn.Module, optimizer: Any, steps: int, start: int = 0, clip: float | None = None) -> list[float]:
    """The usual loop; losses."""
    losses = []
    for i in range(start, start + steps):
        x, y = batch(i)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaled_backward(loss, optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


class Weights(nn.Module):
    """One weight vector, whose gradient is what the loss says: sum(weight * given) has the gradient `given`."""

    def __init__(self, start: float = 1.0, size: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), start))

    def forward(self, given: Tensor) -> Tensor:
        return (self.weight * given).sum()


def through_a_file(state: Any) -> Any:
    """As it comes back from a checkpoint that holds no code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


PROGRAM = """
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
torch.manual_seed(0)
DATA = [(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(4)]
losses = []
"""


def trains(program: str, **names: Any) -> dict[str, Any]:
    """Run a program that finds `apex`, and see that its `losses` fall; what it defined."""
    space: dict[str, Any] = {"__name__": "__main__", **names}
    exec(compile(PROGRAM + textwrap.dedent(program), "program.py", "exec"), space)
    losses = space["losses"]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4]), losses
    return space
