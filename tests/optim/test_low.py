"""bfloat16 weights with masters: split ones in a session, float32 ones in an optimizer's states."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import Parameter

import preamp
from preamp.optim import AdamW

from ..session.toys import loss_of, masters_in, mlp, same, weights


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


def test_states_saved_after_a_weight_was_written_have_its_new_value() -> None:
    def steps(param: Parameter, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            param.grad = torch.full_like(param, 0.3)
            optimizer.step()
            with torch.no_grad():
                param.mul_(0.75)

    param = Parameter(torch.randn(64).bfloat16())
    optimizer = AdamW([param], 1e-2)
    steps(param, optimizer, 3)
    other = Parameter(param.detach().clone())
    resumed = AdamW([other], 1e-2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(other, param)
    steps(param, optimizer, 2)
    steps(other, resumed, 2)
    assert torch.equal(other, param)
    assert torch.equal(resumed.state[other]["master"], optimizer.state[param]["master"])
