"""Steps that the caller takes, not the session: an error before harm where there would be any, else as with torch.

What a session reads before a step is what the step uses: a skip is named, and hooks may change gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import preamp
from preamp import optim
from preamp.errors import SessionError

from ..rows import over
from .toys import loss_of, mlp, same, weights


def test_a_skip_names_its_parameters_and_makes_no_states() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = optim.SGD(model.parameters(), 1e-2, momentum=0.9, dampening=0.5)
    with preamp.prepare(model, optimizer, policy="O4") as session:
        for step in range(4):
            with session.autocast():
                loss = model(torch.ones(2, 4)).float().square().mean()
            session.backward(loss)
            if step in (0, 2):
                model[1].weight.grad[0, 0] = float("nan")
            report = session.step()
            session.zero_grad()
            assert report.skipped is (step in (0, 2))
            assert list(report.nonfinite) == (["1.weight"] if step in (0, 2) else [])
            assert bool(optimizer.state) is (step > 0)


@pytest.mark.parametrize("which", ["own", "other"])
def test_hooks_around_steps_may_change_gradients(which: str) -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [optim.SGD(m.parameters(), 1.0) for m in models]
    with preamp.prepare(models, optimizers, policy="O0") as session:
        for turn in range(2):
            before = [w.clone() for w in weights(models[1])]
            session.backward(sum(m(torch.ones(1, 2)).sum() for m in models))

            def zero(*_: object) -> None:
                for p in models[1].parameters():
                    assert p.grad is not None
                    p.grad.zero_()

            handle = None
            if turn and which == "own":
                handle = optimizers[1].register_step_pre_hook(zero)
            elif turn:
                handle = optimizers[0].register_step_post_hook(zero)
            session.step()
            session.zero_grad()
            same = all(map(torch.equal, before, weights(models[1])))
            assert same is bool(turn)
            if handle is not None:
                handle.remove()


KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "foreach": lambda params: torch.optim.AdamW(params, 0.05, eps=1e-4),
    "fused": lambda params: torch.optim.AdamW(params, 0.05, eps=1e-4, fused=True),
    "preamp": lambda params: preamp.optim.AdamW(params, 0.05, eps=1e-4),
    "split": lambda params: preamp.optim.AdamW(params, 0.05, eps=1e-4, master="split"),
    "split24": lambda params: preamp.optim.AdamW(params, 0.05, eps=1e-4, master="split24"),
}


def regression(level: str, kind: str, **options: Any) -> tuple[nn.Module, Any, preamp.Session, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 1), torch.randn(64, 8)
    optimizer = KINDS[kind](model.parameters())
    options = options or ({"scale": 8.0} if level in ("O1", "O2") else {})
    session = preamp.prepare(model, optimizer, level=level, **options)
    return model, optimizer, session, lambda: F.mse_loss(model(x).float(), x.sum(1, keepdim=True))


@over(level=["O2", "O5"], kind=["foreach", "fused"])
def test_a_loop_of_its_own_is_refused_where_masters_exist(level: str, kind: str) -> None:
    model, optimizer, session, loss_now = regression(level, kind)
    before = weights(model)
    loss_now().backward()
    with pytest.raises(SessionError, match=r"masters.*write session\.backward\(loss\) and session\.step\(\)"):
        optimizer.step()
    assert same(before, weights(model)) and not optimizer.state
    session.zero_grad()
    session.backward(loss_now())
    assert not session.step().skipped, "nothing was lost: the session goes on"
    session.close()
    loss_now().backward()
    optimizer.step()  # and torch's optimizer is its user's again


@pytest.mark.parametrize(("level", "kind"), [("O2", "preamp"), ("O5", "preamp"), ("O5", "split"), ("O5", "split24")])
def test_an_optimizer_that_knows_the_masters_may_be_stepped_by_itself(level: str, kind: str) -> None:
    _, optimizer, session, loss_now = regression(level, kind)
    for _ in range(150):
        loss_now().backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = loss_now().item()
    assert trained < 0.1
    session.close()
    assert loss_now().item() == pytest.approx(trained, abs=0.05)


@over(level=["O1", "O2"], kind=["foreach", "fused", "preamp"], how=["backward", "scale", "backward after many steps"])
def test_scaled_gradients_are_not_stepped(level: str, kind: str, how: str) -> None:
    model, optimizer, session, loss_now = regression(level, kind)
    loss_now = session.autocast()(loss_now)
    steps = 4 if "many" in how else 0
    for _ in range(steps):
        session.backward(loss_now())
        session.step()
        session.zero_grad()
    before = weights(model)
    session.scale(loss_now()).backward() if how == "scale" else session.backward(loss_now())
    with pytest.raises(SessionError, match=r"write session\.step\(\)"):
        optimizer.step()
    assert same(before, weights(model)) and bool(optimizer.state) is bool(steps)
    assert not session.step().skipped
    session.close()


@pytest.mark.parametrize("level", ["O0", "O4", "O3"])
def test_elsewhere_a_step_is_torchs(level: str) -> None:
    model, optimizer, session, loss_now = regression(level, "foreach")
    twin = copy.deepcopy(model)
    other = KINDS["foreach"](twin.parameters())
    loss_now().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        theirs.grad = mine.grad.clone()
    optimizer.step()
    other.step()
    assert same(weights(model), weights(twin))
    session.close()


def test_a_step_inside_the_step_of_another_is_still_the_callers() -> None:
    model, other = mlp(), mlp(1)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(other.parameters(), 0.1)]
    optimizers[0].register_step_post_hook(lambda *_: optimizers[1].step())
    with preamp.prepare([model, other], optimizers, level="O5") as session:
        with session.autocast():
            loss = loss_of(model, 0) + loss_of(other, 0)
        session.backward(loss)
        with pytest.raises(SessionError, match="masters"):
            session.step(optimizers[0])
        other_before = weights(other)
        session.step(optimizers[1])
        assert not same(other_before, weights(other))


def test_a_copy_of_the_optimizer_is_nobodys() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with preamp.prepare(model, optimizer, level="O5"):
        twin = copy.deepcopy(optimizer)
        for parameter in twin.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        twin.step()


@over(level=["O1", "O2", "O5"], kind=["foreach", "fused", "preamp"])
def test_in_full_precision_a_step_is_torchs_and_reaches_the_masters(level: str, kind: str) -> None:
    """As torch.distributed.checkpoint takes one to make states that are missing."""
    model, optimizer, session, loss_now = regression(level, kind)
    with session.autocast():
        session.backward(loss_now())
    with session.full_precision():
        optimizer.zero_grad()
        before = weights(model)
        loss_now().backward()
        optimizer.step()
        after = weights(model)
        optimizer.zero_grad()
    assert not same(before, after)
    session.close()
    assert same(after, weights(model))
