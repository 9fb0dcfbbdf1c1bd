"""Hooks of an optimizer's step, and a `step` put in its place, may look at the model, and write it, in any region."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import preamp
from preamp.errors import SessionError

from ..rows import over
from .toys import backward, batch, loss_of, mlp, train

MAKERS = {"torch": torch.optim.SGD, "preamp": preamp.optim.SGD}


def _trained(level: str | None, kind: str, when: str, what: str) -> list[Tensor]:
    """Weights, and what a hook has seen, after some steps; without a level in plain float32."""
    model: nn.Module = mlp()
    one, two = (MAKERS[kind](model[at].parameters(), lr=0.1) for at in (0, 3))
    session: Any = None if level is None else preamp.prepare(model, [one, two], level=level)
    seen: list[Tensor] = []

    def region(region: str, **how: Any) -> Any:
        return nullcontext() if session is None else getattr(session, region)(**how)

    def hook(*_: Any) -> None:
        if what == "written":
            with region("full_precision", values_only=True), torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.95)
        else:
            with region(what):
                seen.append(model(batch(9)[0]).detach().float())

    step = one.step
    if when == "replaced":
        one.step = lambda *args, **kwargs: (hook(), step(*args, **kwargs), hook())[1]
    else:
        getattr(one, f"register_step_{when}_hook")(hook)
    with session or nullcontext():
        for index in range(4):
            with region("autocast"):
                loss = loss_of(model, index)
            if session is None:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                one.step()
                two.step()
                model.zero_grad()
            else:
                session.backward(loss)
                session.clip_grad_norm_(0.5)
                assert not session.step().skipped
                session.zero_grad()
    return [*seen, *(parameter.detach() for parameter in model.parameters())]


@over(level=["O1", "O2", "O3", "O4", "O5"], kind=MAKERS, when=["pre", "post", "replaced"])
@pytest.mark.parametrize("what", ["full_precision", "autocast", "written"])
def test_a_hook_around_a_step_looks_at_the_model(level: str, kind: str, when: str, what: str) -> None:
    """Gradients went back to their scale in the middle of the step, and masters to their 16 bits."""
    for right, ours in zip(_trained(None, kind, when, what), _trained(level, kind, when, what), strict=True):
        assert (ours - right).norm() <= 3e-2 * right.norm() + 1e-2


@over(level=["O1", "O2", "O5"], kind=MAKERS, when=["pre", "post"])
def test_a_backward_pass_in_a_hook_of_a_step_is_refused(level: str, kind: str, when: str) -> None:
    """Its gradients are scaled, and 16-bit ones would meet the float32 ones that the step takes."""
    model = mlp()
    optimizer = MAKERS[kind](model.parameters(), lr=0.1)
    with preamp.prepare(model, optimizer, level=level) as session:
        getattr(optimizer, f"register_step_{when}_hook")(lambda *_: session.backward(late))
        with session.autocast():
            loss, late = loss_of(model, 0), loss_of(model, 1)
        session.backward(loss)
        with pytest.raises(SessionError, match="in a hook of a step"):
            session.step()


@over(level=["O1", "O2", "O4", "O5"], kind=MAKERS)
def test_a_hook_for_all_optimizers_sees_true_gradients(level: str, kind: str) -> None:
    """As one of a single optimizer does; those of preamp.optim were multiplied by the loss scale."""
    model, seen = mlp(), []
    optimizer = MAKERS[kind](model.parameters(), lr=0.1)
    loss_of(model, 0).backward()
    right = [p.grad.norm() for p in model.parameters()]
    model.zero_grad()
    hook = register_optimizer_step_pre_hook(lambda *_: seen.extend(p.grad.float().norm() for p in model.parameters()))
    try:
        with preamp.prepare(model, optimizer, level=level) as session:
            backward(session, model, 0)
            session.step()
    finally:
        hook.remove()
    torch.testing.assert_close(torch.stack(seen), torch.stack(right), rtol=3e-2, atol=1e-3)


@over(level=["O1", "O2", "O4", "O5"], kind=MAKERS, when=["pre", "post"])
def test_gradients_are_cleared_and_states_loaded_in_hooks_of_steps(level: str, kind: str, when: str) -> None:
    model = mlp()
    optimizer = MAKERS[kind](model.parameters(), lr=0.1, momentum=0.9)
    with preamp.prepare(model, optimizer, level=level) as session:
        backward(session, model, 0)
        session.step()
        session.zero_grad()
        state, before = deepcopy(optimizer.state_dict()), model[0].weight.detach().clone()

        def hook(*_: Any) -> None:
            optimizer.load_state_dict(deepcopy(state))
            if when == "post":
                session.zero_grad()

        getattr(optimizer, f"register_step_{when}_hook")(hook)
        for index in (1, 2):
            backward(session, model, index)
            assert not session.step().skipped
            assert when == "pre" or model[0].weight.grad is None
            session.zero_grad()
        assert not torch.equal(model[0].weight, before)
        assert all(s["momentum_buffer"].dtype is torch.float32 for s in optimizer.state.values())


@over(level=["O1", "O2", "O4", "O5"], kind=MAKERS)
def test_an_optimizer_loads_its_state_inside_full_precision(level: str, kind: str) -> None:
    """Its parameters had 16 bits from then on, inside."""
    model = mlp()
    optimizer = MAKERS[kind](model.parameters(), lr=0.1, momentum=0.9)
    with preamp.prepare(model, optimizer, level=level) as session:
        train(session, model, range(2))
        with session.full_precision():
            optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
            assert all(p.dtype is torch.float32 for p in model.parameters())
            assert model(batch(2)[0]).dtype is torch.float32
        train(session, model, range(2, 4))
