"""Steps that a loop gives up between backward and step, and gradients that are clipped and then go on accumulating."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preamp
from preamp.errors import SessionError

from ..rows import over

OUTLIER, BATCH = torch.tensor([[100.0, 0, 0, 0]]), torch.tensor([[0, 1.0, 0, 0]])  # gradients of a sum are the input
LEVELS = ("O1", "O2", "O4", "O5")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch": torch.optim.SGD,
    "fused": lambda params, lr: torch.optim.SGD(params, lr, fused=True),
    "preamp": preamp.optim.SGD,
}
READS: dict[str, Callable[[preamp.Session], Any]] = {
    "unscale_": lambda session: session.unscale_(),
    "clip norm": lambda session: session.clip_grad_norm_(1.0),
    "clip norm, unscale_": lambda session: (session.clip_grad_norm_(1.0), session.unscale_()),
    "clip value": lambda session: session.clip_grad_value_(1e9),
}


def by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


CLEARS: dict[str, Callable[..., Any]] = {
    "optimizer": lambda session, model, optimizer: optimizer.zero_grad(),
    "optimizer, to zero": lambda session, model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda session, model, optimizer: model.zero_grad(),
    "model, to zero": lambda session, model, optimizer: model.zero_grad(set_to_none=False),
    "by hand": lambda session, model, optimizer: by_hand(model),
    "session": lambda session, model, optimizer: session.zero_grad(),
}


def prepared(level: str, kind: str, **options: Any) -> tuple[nn.Linear, torch.optim.Optimizer, preamp.Session]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=1.0)
    if "scale" not in options and level in ("O1", "O2"):
        options["scale"] = 8.0
    return model, optimizer, preamp.prepare(model, optimizer, level=level, **options)


def backward(session: preamp.Session, model: nn.Module, x: Tensor, **how: Any) -> None:
    with session.autocast():
        loss = model(x).float().sum()
    session.backward(loss, **how)


def applied(session: preamp.Session, model: nn.Linear) -> list[float]:
    """What a step subtracts from the weights."""
    before = model.weight.detach().float().clone()
    assert not session.step().skipped
    return (before - model.weight.detach().float())[0].round(decimals=1).tolist()


@over(level=LEVELS, kind=OPTIMIZERS)
def test_an_abandoned_step_leaves_nothing(level: str, kind: str) -> None:
    every = list(itertools.product(READS, CLEARS, (False, True)))
    for read, clear, late in every[list(OPTIMIZERS).index(kind) :: len(OPTIMIZERS)]:  # what they do is the session's
        model, optimizer, session = prepared(level, kind)
        backward(session, model, OUTLIER)
        READS[read](session)
        if late:  # zero_grad() right before backward, as many loops have it
            with session.autocast():
                loss = model(BATCH).float().sum()
            CLEARS[clear](session, model, optimizer)
            session.backward(loss)
        else:
            CLEARS[clear](session, model, optimizer)
            backward(session, model, BATCH)
        assert applied(session, model) == [0, 1, 0, 0], (read, clear, late)
        session.close()


@pytest.mark.parametrize("level", LEVELS)
def test_an_abandoned_overflow_leaves_nothing(level: str) -> None:
    for read, clear in itertools.product(READS, CLEARS):
        model, optimizer, session = prepared(level, "torch")
        backward(session, model, OUTLIER * float("inf"))
        READS[read](session)
        CLEARS[clear](session, model, optimizer)
        backward(session, model, BATCH)
        assert applied(session, model) == [0, 1, 0, 0], (read, clear)
        session.close()


@over(level=LEVELS, clear=["optimizer", "optimizer, to zero", "model", "by hand"])
def test_abandoned_losses_with_scales_of_their_own(level: str, clear: str) -> None:
    model, optimizer, session = prepared(level, "torch", losses=("a", "b"), scale={"a": 8.0, "b": 4.0})
    backward(session, model, OUTLIER, name="a")
    session.unscale_()
    CLEARS[clear](session, model, optimizer)
    backward(session, model, BATCH, name="b")
    assert applied(session, model) == [0, 1, 0, 0]
    session.close()


@pytest.mark.parametrize("level", LEVELS)
def test_rolling_back_after_a_spike(level: str) -> None:
    """The weights of the last good step are loaded while masters are in place."""
    model, optimizer, session = prepared(level, "torch")
    good, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    backward(session, model, OUTLIER)
    session.clip_grad_value_(1e9)
    model.load_state_dict(good)
    optimizer.load_state_dict(states)
    optimizer.zero_grad()
    backward(session, model, BATCH)
    session.step()
    session.close()
    assert torch.allclose(good["weight"].float() - model.weight.detach(), BATCH, atol=5e-3)


@pytest.mark.parametrize("level", LEVELS)
def test_a_hook_that_clears_gradients_after_the_step(level: str) -> None:
    model, optimizer, session = prepared(level, "torch")
    optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
    backward(session, model, OUTLIER)
    session.step()
    assert model.weight.grad is None
    backward(session, model, BATCH)
    assert applied(session, model) == [0, 1, 0, 0]
    session.close()


@over(level=LEVELS, kind=OPTIMIZERS, losses=[("loss",), ("a", "b")])
def test_clipping_at_every_micro_batch(level: str, kind: str, losses: tuple[str, ...]) -> None:
    """Gradients so far are shrunk and accumulation goes on, as in plain torch."""
    inputs = [OUTLIER, BATCH * 3, BATCH + OUTLIER]

    def plain() -> Tensor:
        model = nn.Linear(4, 1, bias=False)
        for x in inputs:
            model(x).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert model.weight.grad is not None
        return model.weight.grad

    for read in ("clip norm", "clip norm, unscale_"):
        scales = dict.fromkeys(losses, 8.0 if level in ("O1", "O2") else 1.0)
        model, _, session = prepared(level, kind, losses=losses, scale=scales)
        for i, x in enumerate(inputs):
            backward(session, model, x, name=losses[i % len(losses)])
            READS[read](session)
        before = model.weight.detach().float().clone()
        assert not session.step().skipped
        moved = before - model.weight.detach().float()
        assert torch.allclose(moved, plain(), atol=1e-2), (read, moved, plain())
        session.close()


@pytest.mark.parametrize("level", LEVELS)
def test_clipping_a_micro_batch_that_overflowed_skips_the_step(level: str) -> None:
    model, _, session = prepared(level, "torch")
    backward(session, model, OUTLIER * float("inf"))
    session.clip_grad_norm_(1.0)
    backward(session, model, BATCH)
    assert session.step().skipped
    session.close()


@over(level=LEVELS, kind=OPTIMIZERS)
def test_gradients_from_before_prepare_count_in_full(level: str, kind: str) -> None:
    for losses in (("loss",), ("a", "b")):
        torch.manual_seed(0)
        model = nn.Linear(4, 1, bias=False)
        optimizer = OPTIMIZERS[kind](model.parameters(), lr=1.0)
        model(BATCH * 2).sum().backward()
        scale = dict.fromkeys(losses, 8.0 if level in ("O1", "O2") else 1.0)
        session = preamp.prepare(model, optimizer, level=level, losses=losses, scale=scale)
        backward(session, model, BATCH, name=losses[-1])
        assert applied(session, model) == [0, 3, 0, 0]
        session.close()


@over(level=LEVELS, kind=OPTIMIZERS)
def test_gradients_from_before_prepare_may_be_too_small_for_16_bits(level: str, kind: str) -> None:
    """2^-28 is nothing in float16, until it is multiplied by the loss scale."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    model.weight.grad = torch.full((1, 4), 2.0**-28)
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=2.0**28)
    scale = 2.0**12 if level in ("O1", "O2") else None
    with preamp.prepare(model, optimizer, level=level, scale=scale) as session:
        backward(session, model, BATCH * 0)
        session.step()
    assert model.weight.tolist() == [[-1.0] * 4]


@over(level=LEVELS, read=[None, *READS])
def test_close_between_backward_and_step_leaves_true_gradients(level: str, read: str | None) -> None:
    model, optimizer, session = prepared(level, "torch")
    backward(session, model, BATCH * 0.5)
    if read is not None:
        READS[read](session)
    session.close()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is torch.float32
    assert model.weight.grad[0].tolist() == [0, 0.5, 0, 0]
    before = model.weight.detach().clone()
    optimizer.step()
    assert torch.allclose(before - model.weight.detach(), BATCH * 0.5)


def test_prepare_and_close_leave_earlier_gradients_alone() -> None:
    for level in ("O0", *LEVELS):
        model = nn.Linear(4, 1, bias=False)
        model(BATCH * 2).sum().backward()
        with preamp.prepare(model, torch.optim.SGD(model.parameters(), 1.0), level=level):
            pass
        assert model.weight.grad is not None
        assert model.weight.grad[0].tolist() == [0, 2, 0, 0], level


class Stop(BaseException):
    """As Ctrl-C."""


def fail(*_: Any) -> None:
    raise Stop


def hooked(optimizer: torch.optim.Optimizer, model: nn.Module) -> Callable[[], Any]:
    return optimizer.register_step_pre_hook(fail).remove


def overridden(optimizer: torch.optim.Optimizer, model: nn.Module) -> Callable[[], Any]:
    before, optimizer.step = optimizer.step, fail  # type: ignore[method-assign]
    return lambda: setattr(optimizer, "step", before)


def referred_to(optimizer: torch.optim.Optimizer, model: nn.Module) -> Callable[[], Any]:
    references = [torch._C._WeakTensorRef(list(model.parameters())[2])]
    return references.clear


@over(level=LEVELS, kind=OPTIMIZERS, read=("nothing", *READS))
def test_a_step_that_failed_may_be_tried_again(level: str, kind: str, read: str) -> None:
    def weights(fails: Callable[..., Callable[[], Any]] | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
        optimizer = OPTIMIZERS[kind](model.parameters(), lr=0.5)
        with preamp.prepare(model, optimizer, level=level) as session:
            for at in range(3):
                backward(session, model, BATCH)
                undo = fails(optimizer, model) if fails is not None and at == 1 else None
                try:
                    READS[read](session) if read in READS else None
                    session.step()
                except (Stop, SessionError):
                    undo()  # type: ignore[misc]
                    READS[read](session) if fails is referred_to and "unscale_" in read else None
                    session.step()
                session.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    wanted = weights(None)
    for fails in (hooked, overridden, referred_to):
        for ours, theirs in zip(weights(fails), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3, msg=fails.__name__)
