"""Small networks and data for the session's tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import preamp
from preamp.ledger import whole

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
MASTER_LEVELS = ("O2", "O5")


def mlp(seed: int = 0, *, norm: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3)]
    return nn.Sequential(*(layer for layer in layers if norm or not isinstance(layer, nn.LayerNorm)))


def batch(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(size, 6, generator=generator)
    return x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long()


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    return F.cross_entropy(model(x), y)


def backward(session: preamp.Session, model: nn.Module, step: int, factor: float = 1.0, **how: Any) -> Tensor:
    """The loss of a batch, computed in the session's region, after its backward pass."""
    with session.autocast():
        loss = loss_of(model, step) * factor
    session.backward(loss, **how)
    return loss


def step(session: preamp.Session, model: nn.Module, index: int, factor: float = 1.0) -> preamp.StepReport:
    backward(session, model, index, factor)
    report = session.step()
    session.zero_grad()
    return report


def squares(session: preamp.Session, model: Any, *inputs: Tensor, **how: Any) -> Tensor:
    """The mean square of what a model gives, computed in the session's region, after its backward pass."""
    with session.autocast():
        loss: Tensor = model(*inputs).float().square().mean()
    session.backward(loss, **how)
    return loss


def step_of_squares(session: preamp.Session, model: Any, *inputs: Tensor) -> preamp.StepReport:
    squares(session, model, *inputs)
    report = session.step()
    session.zero_grad()
    return report


def train(session: preamp.Session, model: nn.Module, steps: Iterable[int]) -> None:
    for index in steps:
        step(session, model, index)


def masters_in(state: dict[str, Any]) -> list[Tensor]:
    """The masters in a session's state, in float32."""
    return [whole(name, kept) for name, kept in state["masters"].items()]


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))
