"""What prepare() refuses: objects that do not belong together."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import preamp
from preamp.errors import SessionError

from .toys import LEVELS, loss_of, mlp, same, weights


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.1)


def test_without_an_optimizer_it_says_what_to_write() -> None:
    with pytest.raises(SessionError, match=r"prepare\(model, None\) for inference"):
        preamp.prepare(mlp())
    with pytest.raises(SessionError, match=r"is an AdamW"):
        preamp.prepare(torch.optim.AdamW(mlp().parameters()), None)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("level", LEVELS)
def test_a_parameter_of_two_optimizers_is_refused(level: str) -> None:
    """Each would unscale its gradient."""
    model = mlp()
    with pytest.raises(SessionError, match=r"'0\.weight' is in the SGD '0' and in the Adam '1'"):
        preamp.prepare(model, [sgd(model), torch.optim.Adam(model.parameters(), eps=1e-4)], level=level)
    with preamp.prepare(model, sgd(model), level=level, scale=2.0) as session:
        session.backward(loss_of(model, 0) if level not in ("O1", "O4") else loss_in_region(session, model))
        assert not session.step().skipped


def loss_in_region(session: preamp.Session, model: torch.nn.Module) -> torch.Tensor:
    with session.autocast():
        return loss_of(model, 0)


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
