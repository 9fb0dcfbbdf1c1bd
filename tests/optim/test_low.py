"""bfloat16 weights with split masters, and without masters: stochastic rounding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import Parameter

import preamp
from preamp.errors import OptimizerError, PolicyError
from preamp.optim import Adagrad, Adam, AdamW

from ..session.toys import loss_of, masters_in, mlp, same, weights

BF16 = torch.bfloat16


def train(session: preamp.Session, model: torch.nn.Module, steps: range) -> list[float]:
    losses = []
    for step in steps:
        with session.autocast():
            loss = loss_of(model, step)
        session.backward(loss)
        session.clip_grad_norm_(1.0)
        session.step()
        session.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_session_with_split_masters() -> None:
    """The same training as with float32 masters, but for ties; given back in float32."""
    losses, finals = [], []
    for master in ("float32", "split", "split24"):
        model = mlp()
        optimizer = AdamW(model.parameters(), 1e-2, master=master)
        with preamp.prepare(model, optimizer, level="O5") as session:
            losses.append(train(session, model, range(20)))
            state = copy.deepcopy(session.state_dict())
            with session.full_precision():
                assert {p.dtype for p in model.parameters()} == {torch.float32}
                inside = {name: p.detach().clone() for name, p in model.named_parameters()}
            losses.append(train(session, model, range(20, 25)))
        finals.append(weights(model))
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert same([inside[name] for name in state["masters"]], masters_in(state))
    for one, other in ((0, 1), (0, 2)):
        assert losses[2 * one] == pytest.approx(losses[2 * other], rel=1e-2)
        for a, b in zip(finals[one], finals[other], strict=True):
            assert torch.allclose(a, b, atol=2e-2)


def test_misuse() -> None:
    with pytest.raises(OptimizerError, match="Adagrad with master='split'"):
        Adagrad([Parameter(torch.ones(2))], master="split")
    with pytest.raises(OptimizerError, match="master=None"):
        Adam([Parameter(torch.ones(2))], rounding="stochastic")
    half = Parameter(torch.ones(2, dtype=torch.float16))
    half.grad = torch.ones_like(half)
    with pytest.raises(OptimizerError, match="float16"):
        Adam([half], master="split").step()
    model = mlp()
    before = weights(model)
    with pytest.raises(PolicyError, match="level='O5'"):
        preamp.prepare(model, Adam(model.parameters(), master="split"), level="O2")
    assert same(weights(model), before)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_do_not_take_the_place_of_stochastic_rounding(level: str) -> None:
    """Nobody would notice that the rounding is not used, but for the memory."""
    model = mlp()
    optimizer = AdamW(model.parameters(), master=None, rounding="stochastic")
    with pytest.raises(PolicyError, match="O5,masters=no"):
        preamp.prepare(model, optimizer, level=level)
    assert all(p.dtype is torch.float32 for p in model.parameters())
    with preamp.prepare(model, optimizer, policy="O5,masters=no") as session:
        session.backward(loss_of(model, 0))
        session.step()
        assert not session.state_dict()["masters"] and not [s for s in optimizer.state.values() if "master" in s]
