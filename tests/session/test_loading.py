"""States that are loaded into a prepared model while its session goes on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import preamp
from preamp.errors import PreampWarning

from .toys import LEVELS, mlp, same, train, weights


def prepared(level: str, kind: str = "torch") -> tuple[nn.Sequential, torch.optim.Optimizer, preamp.Session]:
    model = mlp()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if kind == "split":
        optimizer = preamp.optim.AdamW(model.parameters(), 0.1, eps=1e-4, master="split")
    return model, optimizer, preamp.prepare(model, optimizer, level=level, scale=2.0)


@pytest.mark.parametrize(("level", "kind"), [*((level, "torch") for level in LEVELS if level != "O3"), ("O5", "split")])
def test_a_float32_state_reaches_the_masters_whole(level: str, kind: str) -> None:
    model, _, session = prepared(level, kind)
    train(session, model, [0])
    dtypes, pretrained = [p.dtype for p in model.parameters()], mlp(3)
    model.load_state_dict(pretrained.state_dict())
    assert [p.dtype for p in model.parameters()] == dtypes
    for mine, theirs in zip(model.parameters(), pretrained.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(mine.dtype))
    session.close()
    assert same(weights(model), weights(pretrained))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_load_that_fails_leaves_16_bit_parameters(level: str) -> None:
    model, _, session = prepared(level)
    dtypes = [p.dtype for p in model.parameters()]
    for state in ({"0.weight": torch.zeros(16, 6)}, {**mlp().state_dict(), "3.weight": torch.zeros(1)}):
        with pytest.raises(RuntimeError):
            model.load_state_dict(state)
        assert [p.dtype for p in model.parameters()] == dtypes
    train(session, model, [0])
    session.close()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_going_back_by_16_bit_values_is_told(level: str) -> None:
    """As fastai's lr_find does: it saves the model, tries learning rates, and loads it."""
    model, _, session = prepared(level)
    train(session, model, [0])
    saved = copy.deepcopy(model.state_dict())
    train(session, model, [0])
    model.load_state_dict(saved)
    with pytest.warns(PreampWarning, match=r"loaded from a state that has them in 16 bits.*session\.state_dict\(\)"):
        train(session, model, [0])
    train(session, model, [0])  # once
    session.close()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("order", ["model, optimizer, session", "session, optimizer, model", "in full precision"])
def test_the_ways_to_go_back_that_lose_nothing_are_silent(level: str, order: str) -> None:
    def run(away: bool) -> list[Tensor]:
        model, optimizer, session = prepared(level)
        train(session, model, range(2))
        if away and order == "in full precision":
            with session.full_precision(values_only=True):
                kept = copy.deepcopy(model.state_dict())
        else:
            kept = copy.deepcopy(model.state_dict())
        states = {"model": kept, "optimizer": optimizer.state_dict(), "session": session.state_dict()}
        states = copy.deepcopy(states)
        if away:
            train(session, model, range(3))
            if order == "in full precision":
                with session.full_precision(values_only=True):
                    model.load_state_dict(kept)
            else:
                parts = {"model": model, "optimizer": optimizer, "session": session}
                for name in order.split(", "):
                    parts[name].load_state_dict(states[name])  # type: ignore[attr-defined]
        train(session, model, [0])
        session.close()
        return weights(model)

    assert level == "O3" or same(run(True), run(False))
