"""`torch.set_default_device`: what preamp makes for itself lies where it is wanted, not where that says.

The default here is "meta", whose tensors have no values: one that is made there by mistake cannot be read or mixed.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import preamp
from preamp.kernels import read

MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: preamp.optim.AdamW(p, 1e-2),
    "AdamW, split": lambda p: preamp.optim.AdamW(p, 1e-2, master="split"),
    "AdamW, 8 bits": lambda p: preamp.optim.AdamW(p, 1e-2, states="8bit"),
    "AdamW, by chance": lambda p: preamp.optim.AdamW(p, 1e-2, master=None, rounding="stochastic"),
    "SGD": lambda p: preamp.optim.SGD(p, 1e-2, momentum=0.9),
    "Adagrad": lambda p: preamp.optim.Adagrad(p, 1e-2),
    "Lion": lambda p: preamp.optim.Lion(p, 1e-3, master=None, rounding="stochastic"),
    "LAMB": lambda p: preamp.optim.LAMB(p, 1e-2),
    "NovoGrad": lambda p: preamp.optim.NovoGrad(p, 1e-2, eps=1e-3),
    "torch AdamW, fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
}
CASES = [(level, maker) for level in ("O0", "O1", "O2", "O4", "O5") for maker in ("AdamW", "SGD", "torch AdamW, fused")]
CASES += [("O3", "NovoGrad"), ("O2", "LAMB"), ("O1", "Adagrad"), ("O5", "AdamW, split")]
CASES += [("O5", "AdamW, 8 bits"), ("O5,masters=no", "AdamW, by chance"), ("O5,masters=no", "Lion")]


@pytest.fixture(autouse=True)
def no_values() -> Iterator[None]:
    with torch.device("meta"):
        yield


def network() -> nn.Sequential:
    with torch.device("cpu"):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cpu").manual_seed(step)
    x = torch.randn(16, 6, generator=generator, device="cpu")
    return x, x[:, :3].argmax(1)


def train(level: str, maker: str, folder: Path) -> list[Tensor]:
    model = network()
    optimizer = MAKERS[maker](model.parameters())
    scale: Any = {"scale": "hysteresis"} if level in ("O1", "O2") else {}
    with preamp.prepare(model, optimizer, policy=level, **scale) as session:
        for step in range(6):
            for half in range(2):
                x, y = batch(2 * step + half)
                x[0, 0] = torch.inf if step == 3 else x[0, 0]
                with session.autocast():
                    loss = F.cross_entropy(model(x), y)
                session.backward(loss, sync=half == 1)
            session.clip_grad_norm_(1.0)
            session.step()
            session.zero_grad()
            if step == 4:
                with session.full_precision():
                    model(batch(0)[0])
                file = folder / f"{level}.pt"
                preamp.checkpoint.save(file, model=model, optimizer=optimizer, session=session)
                preamp.checkpoint.load(file, model=model, optimizer=optimizer, session=session)
                session.load_state_dict(copy.deepcopy(session.state_dict()))
        assert session.steps == 6 and session.skipped == 1
        assert session.last_step is not None and not session.last_step.skipped
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("level", "maker"), CASES)
def test_sessions_train_as_without(level: str, maker: str, tmp_path: Path) -> None:
    with_default = train(level, maker, tmp_path)
    with torch.device("cpu"):
        assert all(torch.equal(a, b) for a, b in zip(with_default, train(level, maker, tmp_path), strict=True))


@pytest.mark.parametrize("schedule", ["backoff", "hysteresis"])
def test_scalers(schedule: str) -> None:
    model = network()
    optimizer, scaler = preamp.optim.LAMB(model.parameters(), 1e-2), preamp.GradScaler("cpu", schedule=schedule)
    for step in range(6):
        x, y = batch(step)
        x[0, 0] = torch.inf if step == 3 else x[0, 0]
        with preamp.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.skipped is (step == 3)
    state = io.BytesIO()
    torch.save(scaler.state_dict(), state)
    state.seek(0)
    scaler.load_state_dict(torch.load(state))
    assert all(p.device.type == "cpu" and torch.isfinite(p).all() for p in model.parameters())


def test_readings_and_epsilons() -> None:
    gradients = [batch(0)[0], torch.full((5,), 1e-6, device="cpu"), torch.zeros(3, dtype=torch.float16, device="cpu")]
    reading = read(gradients)
    assert float(reading.found) == 0 and reading.nonfinite.tolist() == [False] * 3
    assert float(read([]).norm) == 0
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(3, dtype=torch.float16, device="cpu"))])
    (row,) = preamp.safe_eps(optimizer, preamp.policy("O3"))
    assert row.becomes == 0


def findings() -> list[str]:
    model = network()
    optimizer = preamp.optim.AdamW(model.parameters(), 1e-2)
    with preamp.prepare(model, optimizer, level="O2") as session, preamp.doctor.watch(session, every=1) as watched:
        for step in range(4):
            x, y = batch(step)
            x[0, 0] = torch.inf if step == 2 else x[0, 0]
            with session.autocast():
                loss = F.cross_entropy(model(x), y)
            session.backward(loss)
            session.step()
            session.zero_grad()
        assert session.skipped == 1
    examined = preamp.doctor.examine(model, optimizer, "O2", example=batch(0)[0])
    return [str(finding) for finding in (*watched.findings, *examined.findings)]


def test_the_doctor_sees_what_it_sees_without() -> None:
    seen = findings()
    with torch.device("cpu"):
        assert seen == findings() != []
