"""The range test: it finds what there is to find, counts skips, and leaves no trace."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import preamp
from preamp.errors import PreampError, SessionError
from preamp.lr_finder import LrCurve, sweep

from ..rows import over
from ..session.toys import LEVELS, batch, mlp


def loader() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [batch(i, 16) for i in range(7)]


def loss_fn(model: nn.Module):
    def loss(data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = data
        return F.cross_entropy(model(x), y)

    return loss


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, session: preamp.Session) -> str:
    torch.set_printoptions(precision=10, threshold=100_000)
    try:
        state = [model.state_dict(), optimizer.state_dict(), session.state_dict(), random.getstate()]
        return f"{state} {np.random.get_state()} {torch.get_rng_state().sum()}"
    finally:
        torch.set_printoptions(profile="default")


@over(level=LEVELS, trained=[False, True])
def test_everything_is_restored(level: str, trained: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 3))
    temperature = nn.Parameter(torch.ones(()))  # in no model
    optimizer = torch.optim.AdamW([*model.parameters(), temperature], 1e-3, eps=1e-4)

    def scaled(data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return loss_fn(model)(data) * temperature

    with preamp.prepare(model, optimizer, level=level) as session:
        for index in range(3 if trained else 0):
            with session.autocast():
                loss = scaled(batch(index))
            session.backward(loss)
            session.step()
            session.zero_grad()
        group = optimizer.param_groups[0]
        before, own = everything(model, optimizer, session), temperature.item()
        curve = sweep(session, loader(), scaled, steps=20, start_lr=1e-4, end_lr=1.0)
        assert everything(model, optimizer, session) == before and temperature.item() == own
        assert optimizer.param_groups[0] is group and group["lr"] == 1e-3
        assert len(curve.lrs) + curve.skipped >= 20 or curve.diverged
        assert all(p.grad is None for p in model.parameters())


def test_everything_is_restored_after_an_exception() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    calls = []

    def failing(data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        calls.append(data)
        if len(calls) == 5:
            raise ZeroDivisionError
        return loss_fn(model)(data)

    with preamp.prepare(model, optimizer, level="O2") as session:
        before = everything(model, optimizer, session)
        with pytest.raises(ZeroDivisionError):
            sweep(session, loader(), failing, steps=20)
        assert everything(model, optimizer, session) == before


def test_suggestions_on_a_problem_with_a_known_answer() -> None:
    """Gradient descent on x^2/2 contracts by |1 - lr| a step: useful below 2, divergent above."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 4.0)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with preamp.prepare(model, optimizer, level="O0") as session:
        curve = sweep(
            session, [torch.ones(1, 1)], lambda x: 0.5 * model(x).pow(2).sum(),
            start_lr=1e-4, end_lr=100.0, steps=120, smoothing=0.5,
        )  # fmt: skip
    assert curve.diverged
    assert 2.0 < curve.lrs[-1] < 50.0
    for lr in curve.suggestions.values():
        assert 1e-3 < lr < 2.0
    assert curve.suggestions.keys() == {"valley", "steepest", "minimum/10"}


def test_skipped_steps_are_counted_and_left_out() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with preamp.prepare(model, optimizer, level="O1", scale=preamp.DynamicScale(2.0**40)) as session:
        curve = sweep(session, loader(), loss_fn(model), steps=40, start_lr=1e-4, end_lr=0.1)
        assert curve.skipped > 5, "a scale of 2**40 overflows until it has come down"
        assert len(curve.lrs) == 40 - curve.skipped
        assert all(map(math.isfinite, curve.losses))
        assert session.loss_scale() == 2.0**40, "and is back where it was"


def test_groups_keep_the_ratio_of_their_rates() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters(), "lr": 0.01}]
    )
    seen = []
    optimizer.register_step_pre_hook(lambda o, a, k: seen.append(o.param_groups[0]["lr"] / o.param_groups[1]["lr"]))
    with preamp.prepare(model, optimizer, level="O0") as session:
        sweep(session, loader(), loss_fn(model), steps=5, end_lr=0.1)
    assert seen == pytest.approx([10.0] * 5)


def test_misuse_is_told() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with preamp.prepare(model, optimizer, level="O0") as session:
        for bad in ({"start_lr": 0}, {"start_lr": 1, "end_lr": 0.1}, {"end_lr": math.inf}, {"steps": 3},
                    {"smoothing": 1.0}, {"stop_factor": 1.0}):  # fmt: skip
            with pytest.raises(PreampError, match="a sweep needs"):
                sweep(session, loader(), loss_fn(model), **bad)
        with pytest.raises(PreampError, match="no batch"):
            sweep(session, [], loss_fn(model))
        with pytest.raises(PreampError, match="never finite"):
            sweep(session, loader(), lambda data: loss_fn(model)(data) * float("nan"), steps=5)
    with preamp.prepare(mlp(), None, level="O0") as session, pytest.raises(SessionError, match="without an optimizer"):
        sweep(session, loader(), loss_fn(model))


def test_a_flat_curve_suggests_nothing_steep() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    constant = copy.deepcopy(model)

    def loss(data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return sum(p.sum() * 0 for p in model.parameters()) + loss_fn(constant)(loader()[0]).detach()

    with preamp.prepare(model, optimizer, level="O0") as session:
        curve = sweep(session, loader(), loss, steps=8)
    assert isinstance(curve, LrCurve)
    assert curve.valley is None or curve.smoothed[0] - curve.smoothed[-1] < 1e-6
