"""A session behind GradScaler's interface trains as the session itself."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preamp
from preamp.errors import SessionError, StateError

from ..reliability.runs import alike as same

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "preamp": lambda params: preamp.optim.AdamW(params, 1e-2, eps=1e-4),
    "fused": lambda params: torch.optim.AdamW(params, 1e-2, eps=1e-4, fused=True),
    "foreach": lambda params: torch.optim.SGD(params, 1e-2, momentum=0.9),
}


def made(level: str, kind: str = "preamp") -> tuple[nn.Module, torch.optim.Optimizer, preamp.Session]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    optimizer = OPTIMIZERS[kind](model.parameters())
    return model, optimizer, preamp.prepare(model, optimizer, level=level)


def batch(i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    x = torch.randn(5, 6, generator=generator)
    return (x * float("inf") if i == 3 else x), torch.randn(5, 3, generator=generator)


def loss_of(session: preamp.Session, model: nn.Module, i: int) -> Tensor:
    x, y = batch(i)
    with session.autocast():
        return (model(x).float() - y).square().mean()


def trained(
    level: str, kind: str, steps: range, clip: str | None = None, *, scaled: bool = True, state: Any = None
) -> Any:
    """By a loop that knows GradScaler alone, or by one that knows sessions; two micro-batches a step."""
    model, optimizer, session = made(level, kind)
    scaler = preamp.SessionScaler(session)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
    skips = []
    for i in steps:
        for half in (2 * i, 2 * i + 1):
            loss = loss_of(session, model, half) / 2
            scaler.scale(loss).backward() if scaled else session.backward(loss)
        if clip is not None:
            scaler.unscale_(optimizer) if scaled else session.unscale_()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if scaled:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            skips.append((scaler.skipped, scaler.get_scale()))
        else:
            report = session.step()
            session.zero_grad()
            skips.append((report.skipped, session.loss_scale()))
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": session.state_dict()}
    copied = copy.deepcopy(states)
    session.close()
    return skips, copied


@pytest.mark.parametrize(
    ("level", "kind", "clip"),
    [
        (level, kind, (None, "unscaled")[(i + j) % 2])
        for i, level in enumerate(LEVELS)
        for j, kind in enumerate(OPTIMIZERS)
    ],
)
def test_it_trains_as_the_session(level: str, kind: str, clip: str | None) -> None:
    skips, found = trained(level, kind, range(12), clip)
    wanted_skips, wanted = trained(level, kind, range(12), clip, scaled=False)
    assert skips == wanted_skips and [skip for skip, _ in skips].count(True) >= 1
    assert same(found, wanted)


@pytest.mark.parametrize("level", LEVELS)
def test_a_resumed_run_goes_on_bit_for_bit(level: str) -> None:
    _, wanted = trained(level, "preamp", range(12))
    _, half = trained(level, "preamp", range(6))
    skips, resumed = trained(level, "preamp", range(6, 12), state=half)
    assert len(skips) == 6 and same(resumed, wanted)


def test_it_is_a_grad_scaler() -> None:
    _, _, session = made("O2")
    scaler = preamp.SessionScaler(session)
    assert isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() and not scaler.skipped
    assert scaler.get_scale() == 2.0**16 == session.loss_scale()


def test_losses_in_a_list_a_tuple_and_an_iterator() -> None:
    model, _, session = made("O2")
    scaler = preamp.SessionScaler(session)
    losses = [loss_of(session, model, 0), loss_of(session, model, 1)]
    listed, paired, rest = scaler.scale(losses), scaler.scale(tuple(losses)), scaler.scale(iter(losses))
    assert type(listed) is list and type(paired) is tuple
    assert same(listed, list(paired)) and same(listed, list(rest))
    assert torch.equal(listed[0], losses[0] * 2.0**16)
    with pytest.raises(ValueError, match="takes a loss or an iterable of losses; this is"):
        scaler.scale(3.0)


def test_two_optimizers_stepped_one_by_one() -> None:
    def stepped(scaled: bool) -> tuple[list[Tensor], float]:
        torch.manual_seed(0)
        models = {"a": nn.Linear(6, 4), "b": nn.Linear(4, 3)}
        optimizers = {name: preamp.optim.SGD(model.parameters(), 0.1) for name, model in models.items()}
        session = preamp.prepare(models, optimizers, level="O2")
        scaler = preamp.SessionScaler(session)
        for i in range(8):
            x, y = batch(i)
            with session.autocast():
                loss = (models["b"](models["a"](x)).float() - y).square().mean()
            scaler.scale(loss).backward() if scaled else session.backward(loss)
            for optimizer in optimizers.values():
                scaler.step(optimizer) if scaled else session.step(optimizer)
            scaler.update()
            for optimizer in optimizers.values():
                optimizer.zero_grad()
        scale = session.loss_scale()
        session.close()
        return [p.detach().clone() for model in models.values() for p in model.parameters()], scale

    assert same(stepped(True), stepped(False))


def test_what_it_refuses() -> None:
    model, optimizer, session = made("O2")
    scaler = preamp.SessionScaler(session)
    with pytest.raises(SessionError, match=r"takes what preamp\.prepare\(model, optimizer\) returns; this is"):
        preamp.SessionScaler(model)  # type: ignore[arg-type]
    scaler.scale(loss_of(session, model, 0)).backward()
    with pytest.raises(RuntimeError, match="takes only the optimizer"):
        scaler.step(optimizer, closure=lambda: 0.0)
    scaler.step(optimizer, None)
    for refused in (
        lambda: scaler.update(2.0), lambda: scaler.set_growth_factor(3.0), lambda: scaler.set_backoff_factor(0.3),
        lambda: scaler.set_growth_interval(3),
    ):  # fmt: skip
        with pytest.raises(SessionError, match=r"prepare\(..., scale=preamp.DynamicScale"):
            refused()
    for copied in (lambda: copy.deepcopy(scaler), lambda: pickle.dumps(scaler)):
        with pytest.raises(SessionError, match="save state_dict"):
            copied()
    with pytest.raises(StateError):
        scaler.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
    with pytest.raises(SessionError, match=r"without session\.backward"):
        scaler.step(optimizer)
    session.close()
    with pytest.raises(SessionError, match="closed"):
        scaler.scale(torch.ones(()))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_backward_to_inputs_of_a_loss_made_in_full_precision(level: str) -> None:
    """In whose graph the parameters are other tensors."""

    def gradients(scaled: bool) -> list[Tensor | None]:
        model, _, session = made(level)
        with session.full_precision():
            loss = model(batch(0)[0]).square().mean()
        inputs: Any = {"inputs": list(model[0].parameters())}
        preamp.SessionScaler(session).scale(loss).backward(**inputs) if scaled else session.backward(loss, **inputs)
        return [p.grad for p in model.parameters()]

    found = gradients(True)
    assert same(found, gradients(False)) and [g is None for g in found] == [False] * 2 + [True] * 4


def test_losses_with_scales_of_their_own_are_refused() -> None:
    model = nn.Linear(6, 3)
    optimizer = preamp.optim.SGD(model.parameters(), 0.1)
    session = preamp.prepare(model, optimizer, level="O2", losses=("a", "b"))
    with pytest.raises(SessionError, match="several losses"):
        preamp.SessionScaler(session).scale(torch.ones((), requires_grad=True))
