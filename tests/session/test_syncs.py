"""How often a step waits for the device. The meta device is an accelerator that refuses every wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from preamp.errors import SessionError
from preamp.session import _prepare

from ..rows import over
from .toys import mlp, same, step, weights

SCALED = "params=fp32,compute=fp16,scale={},ops=none"
LOW = "params=fp16,compute=fp16,norms=fp16,masters=yes,scale={},ops=none"

OURS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "Adam": lambda p: preamp.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: preamp.optim.AdamW(p),
    "SGD": lambda p: preamp.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: preamp.optim.Adagrad(p),
}


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model on the meta device, which prepare() refuses outside this test."""
    monkeypatch.setattr(_prepare, "_device_type", lambda models: "meta")
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def train(session: preamp.Session, model: nn.Module, steps: int, clip: str) -> None:
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        loss = model(torch.ones(3, 4, device="meta", dtype=dtype)).float().sum()
        session.backward(loss)
        if clip == "norm":
            session.clip_grad_norm_(1.0)
        elif clip == "value":
            session.clip_grad_value_(1.0)
        session.step()
        session.zero_grad()


@pytest.mark.parametrize(("policy", "scale", "clip", "name"), [
    (SCALED, "dynamic", "norm", "Adam"), (SCALED, "hysteresis", "value", "AdamW"), (SCALED, "1024", "no", "SGD"),
    (SCALED, "dynamic", "norm", "Adagrad"), (LOW, "hysteresis", "value", "Adam"), (LOW, "1024", "no", "AdamW"),
    (LOW, "dynamic", "norm", "SGD"), (LOW, "hysteresis", "value", "Adagrad"),
])  # fmt: skip
def test_a_step_of_ours_never_waits(meta: nn.Module, policy: str, scale: str, clip: str, name: str) -> None:
    with preamp.prepare(meta, OURS[name](meta.parameters()), policy=policy.format(scale)) as session:
        train(session, meta, 7, clip)
        assert session.steps == 7
        with pytest.raises(RuntimeError, match="meta"):
            assert session.last_step.skipped  # which waits, and here cannot


def test_any_other_optimizer_waits_once(meta: nn.Module) -> None:
    """Counted through: the wait that meta refuses is the one that decides about the step."""
    optimizer = torch.optim.SGD(meta.parameters(), 0.1)
    with preamp.prepare(meta, optimizer, policy=SCALED.format("dynamic")) as session:
        waits = 0
        original = torch.Tensor.__bool__

        def answer(tensor: torch.Tensor) -> bool:
            nonlocal waits
            if tensor.device.type != "meta":
                return original(tensor)
            waits += 1
            return False

        torch.Tensor.__bool__ = answer  # type: ignore[method-assign]
        try:
            train(session, meta, 5, "norm")
        finally:
            torch.Tensor.__bool__ = original  # type: ignore[method-assign]
        assert waits == 5


STEPPED = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, 1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.9),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-2),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
}


def test_our_optimizers_never_wait_under_our_scaler() -> None:
    with torch.device("meta"):
        params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    optimizer = preamp.optim.AdamW(params)
    scaler = preamp.GradScaler("meta")
    for _ in range(4):
        scaler.scale(sum(p.sum() for p in params)).backward()
        scaler.step(optimizer)
        scaler.update()


@over(level=["O1", "O2"], name=STEPPED)
def test_a_skip_on_the_device_is_a_skip(level: str, name: str) -> None:
    """Parameters, states and their counters are put back bit for bit; steps around it are the same as ever."""
    results = []
    for skip in ("host", "device"):
        model = mlp()
        optimizer = STEPPED[name](model.parameters())
        with preamp.prepare(model, optimizer, level=level, scale=256.0, skip=skip) as session:
            for index in range(6):
                report = step(session, model, index, factor=float("inf") if index in (0, 3) else 1.0)
                assert report.skipped == (index in (0, 3))
            assert session.skipped == 2
            results.append((weights(model), [v.clone() for s in optimizer.state.values() for v in s.values()]))
    assert same(results[0][0], results[1][0]) and same(results[0][1], results[1][1])


def test_skip_is_checked() -> None:
    model = mlp()
    with pytest.raises(SessionError, match="skip='never'"):
        preamp.prepare(model, None, level="O4", skip="never")
