"""Rough treatment: exceptions in the middle, two sessions at once, odd models, threads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import preamp
from preamp.errors import PolicyError, SessionError

from .toys import LEVELS, backward, batch, mlp, step


@pytest.mark.parametrize("level", LEVELS)
def test_odd_parameters_are_left_alone(level: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)
            self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.waves = nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False)
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
            self.register_buffer("nothing", None)
            self.register_parameter("absent", None)

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.linear(x) * self.wide.to(x.dtype)

    model = Odd()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level, scale=8.0) as session:
        assert model.wide.dtype is torch.float64
        assert model.waves.dtype is torch.complex64
        assert model.count.dtype is torch.long
        assert not step(session, model, 0).skipped
        with session.full_precision():
            model(batch(0)[0])
        assert int(model.count) == 2


def test_a_model_without_parameters_and_a_session_without_an_optimizer() -> None:
    with preamp.prepare(nn.ReLU(), None, level="O5") as session:
        with session.autocast():
            assert session.policy.level == "O5"
        with pytest.raises(SessionError, match="without an optimizer"):
            session.step()
    model = mlp().eval()
    x = torch.randn(4, 6)
    expected = model(x)
    with preamp.prepare(model, None, level="O5") as session, torch.no_grad(), session.autocast():
        assert torch.allclose(model(x), expected, atol=0.05)


def test_lazy_parameters_are_asked_for_first() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises((PolicyError, SessionError), match=r"batch through the model|lazy"):
        preamp.prepare(model, None, level="O2")


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_two_losses_in_one_graph_and_retain_graph(level: str) -> None:
    model = mlp()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level, scale=16.0) as session:
        x, y = batch(0)
        with session.autocast():
            out = model(x)
            first, second = F.cross_entropy(out, y), out.pow(2).mean()
        session.backward(first, retain_graph=True)
        session.backward(second)
        assert not session.step().skipped


def test_reports_are_values_of_their_own() -> None:
    model = mlp()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level="O1") as session:
        reports = [step(session, model, index) for index in range(3)]
        backward(session, model, 0, factor=float("inf"))
        reports.append(session.step())
        session.zero_grad()
        assert session.last_step is reports[-1]
        assert [r.index for r in reports] == [0, 1, 2, 3]
        assert [r.skipped for r in reports] == [False, False, False, True]
        assert reports[0].scale == reports[-1].scale == 65536.0
        assert "skipped=True" in repr(reports[-1])
