"""A loop that forgets `session.autocast()` is told at its first loss; others hear nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import preamp
from preamp.errors import PreampWarning

Loss = Callable[["preamp.Session", nn.Module, Tensor], Tensor]


class Doubled(torch.autograd.Function):
    """A function of the user's, whose backward nobody can look into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def in_region(session: preamp.Session, model: nn.Module, x: Tensor) -> Tensor:
    with session.autocast():
        return model(x).float().square().mean()


def in_torchs(session: preamp.Session, model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", session.policy.compute):
        return model(x).float().square().mean()


def in_ours(session: preamp.Session, model: nn.Module, x: Tensor) -> Tensor:
    with preamp.autocast("cpu", session.policy.compute):
        return model(x).float().square().mean()


def checkpointed(session: preamp.Session, model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x.requires_grad_(), use_reentrant=True).square().mean()


def own_function(session: preamp.Session, model: nn.Module, x: Tensor) -> Tensor:
    return Doubled.apply(model(x)).square().mean()


def without_products(session: preamp.Session, model: nn.Module, x: Tensor) -> Tensor:
    return sum((p.square().sum() for p in model.parameters()), torch.zeros(()))


def compiled(session: preamp.Session, model: nn.Module, x: Tensor) -> Tensor:
    def forward(x: Tensor) -> Tensor:
        with session.autocast():
            return model(x).float().square().mean()

    return torch.compile(forward, backend="aot_eager")(x)


def outside(session: preamp.Session, model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def trained(level: str, loss: Loss, steps: int = 3) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", PreampWarning)
        with preamp.prepare(model, optimizer, level=level) as session:
            for _ in range(steps):
                session.backward(loss(session, model, torch.randn(8, 4)))
                session.step()
                session.zero_grad()
    told = [each for each in found if each.category is PreampWarning]
    assert all(each.filename == __file__ for each in told)
    return [str(each.message) for each in told]


@pytest.mark.parametrize(("level", "dtype"), [("O1", "fp16"), ("O4", "bf16")])
def test_a_forgotten_region_is_told_once_where_the_loss_is(level: str, dtype: str) -> None:
    (told,) = trained(level, outside)
    assert told.startswith(f"the session computes in {dtype} inside of session.autocast(), and this loss was computed")


@pytest.mark.parametrize(
    "loss", [in_region, in_torchs, in_ours, checkpointed, own_function, without_products, compiled],
    ids=lambda loss: loss.__name__,
)  # fmt: skip
def test_regions_and_what_cannot_be_looked_into_are_not_told(loss: Loss) -> None:
    assert trained("O4", loss) == []


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_levels_that_need_no_region_are_not_told(level: str) -> None:
    assert trained(level, outside) == []


def test_convolutions_and_attention_are_seen() -> None:
    model = nn.ModuleDict({"conv": nn.Conv1d(4, 4, 1), "attend": nn.MultiheadAttention(4, 2, batch_first=True)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 4, 4)
    for loss in (lambda: model["conv"](x).sum(), lambda: model["attend"](x, x, x)[0].sum()):
        with (
            preamp.prepare(model, optimizer, level="O4") as session,
            pytest.warns(PreampWarning, match="this loss was computed in float32"),
        ):
            session.backward(loss())
