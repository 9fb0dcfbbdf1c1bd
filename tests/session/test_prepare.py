"""What prepare() refuses: objects that do not belong together."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from preamp.errors import SessionError

from .toys import LEVELS, backward, loss_of, mlp, same, step, weights


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_of_another_model_is_refused(level: str) -> None:
    """A model that was made anew, or copied, after its optimizer is a classic."""
    model = mlp()
    optimizer = sgd(model)
    twin = copy.deepcopy(model)
    before = weights(twin)
    with pytest.raises(SessionError, match=r"the SGD has 6 parameters and none of them is the model's"):
        preamp.prepare(twin, optimizer, level=level)
    assert same(before, weights(twin)) and not optimizer._optimizer_step_pre_hooks
    with pytest.raises(SessionError, match=r"the SGD '1' has 6 parameters"):
        preamp.prepare([twin, mlp(1)], [sgd(twin), optimizer], level=level)
    with preamp.prepare(model, torch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.ones(1))], 0.1)):
        pass


@pytest.mark.parametrize("level", ["O0", "O4"])
@pytest.mark.parametrize("kind", [torch.optim, preamp.optim])
def test_optimizers_may_have_parameters_in_common_where_gradients_are_true(level: str, kind: Any) -> None:
    """An encoder that two optimizers index, as torch does it: clipped by each, and stepped in turn or at once."""

    def optimizers(model: torch.nn.Module) -> list[Any]:
        parameters = [*model.parameters()]
        return [kind.SGD(parameters[:4], 0.1, momentum=0.9), kind.Adam(parameters[2:], 1e-2, eps=1e-4)]

    model, twin = mlp(), mlp()
    one, two = optimizers(model)
    session = preamp.prepare(model, [one, two], level=level)
    first, second = optimizers(twin)
    for index in range(6):
        backward(session, model, 0)
        loss_of(twin, 0).backward()
        for mine, theirs in ((one, first), (two, second)):
            session.clip_grad_norm_(0.05, optimizer=mine)
            torch.nn.utils.clip_grad_norm_([p for group in theirs.param_groups for p in group["params"]], 0.05)
            if index % 2:
                session.step(mine)
                theirs.step()
        if not index % 2:
            session.step()
            first.step(), second.step()
        session.zero_grad()
        twin.zero_grad()
    backward(session, model, 0)
    with pytest.raises(SessionError, match="have parameters in common"):
        session.clip_grad_norm_(0.05)
    session.close()
    bound = 1e-6 if level == "O0" else 5e-3
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=bound)


@pytest.mark.parametrize("level", [each for each in LEVELS if each not in ("O0", "O4")])
def test_a_parameter_of_two_optimizers_is_refused_where_each_would_unscale_it(level: str) -> None:
    model = mlp()
    with pytest.raises(SessionError, match=r"'0\.weight' is in the SGD '0' and in the Adam '1'"):
        preamp.prepare(model, [sgd(model), torch.optim.Adam(model.parameters(), eps=1e-4)], level=level)
    with preamp.prepare(model, sgd(model), level=level, scale=2.0) as session:
        assert not step(session, model, 0).skipped


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_bare_module_that_only_holds_parameters(level: str) -> None:
    model = nn.Module()
    model.weights = nn.ParameterList([torch.ones(4, 4)])
    before = type(model)
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level, scale=8.0) as session:
        with session.autocast():
            loss = (model.weights[0] @ torch.ones(4, 1, dtype=model.weights[0].dtype)).float().sum()
        session.backward(loss)
        session.step()
    assert type(model) is before and model.weights[0][0, 0].item() == pytest.approx(0.9, abs=1e-3)
