"""Sessions read gradients where an optimizer of `preamp.optim` has packed them for its step, and copy them once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import preamp
from preamp import optim

from .toys import loss_of, mlp, weights

LEVELS = ["O0", "O1", "O2", "O4", "O5"]


class Concatenations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.cat, torch.ops.aten.flatten_dense_tensors):
            self.entries += sum(tensor.numel() for tensor in args[0])
        return func(*args, **(kwargs or {}))


def trained(
    level: str, flat: bool | None, between: Callable[[Any, nn.Module], None] = lambda *_: None, hold: int = 0
) -> tuple[list[Tensor], list[float], int]:
    model = mlp()
    held = [p.data for p in model.parameters()][:hold]
    optimizer = optim.AdamW(model.parameters(), 1e-2, flat=flat)
    norms, copied = [], 0
    with preamp.prepare(model, optimizer, policy=level, scale=8.0) as session:
        for step in range(7):
            with session.autocast():
                loss = loss_of(model, step) * (float("inf") if step in (0, 4) else 1.0)
            session.backward(loss)
            between(session, model)
            with Concatenations() as seen:
                report = session.step()
            copied = seen.entries
            norms.append(float(report.grad_norm))
            session.zero_grad()
        assert session.skipped == 2 and len(held) == hold
        return weights(model), norms, copied


def clip(session: Any, model: nn.Module) -> None:
    session.clip_grad_norm_(0.1)


def clip_and_write(session: Any, model: nn.Module) -> None:
    """What is written after the reading is what is stepped."""
    session.clip_grad_norm_(0.1)
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.grad[..., 0] = 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("between", [lambda *_: None, clip, clip_and_write], ids=["plain", "clip", "write"])
def test_the_same_as_one_by_one(level: str, between: Callable[[Any, nn.Module], None]) -> None:
    packed, norms, _ = trained(level, None, between)
    apart, expected, _ = trained(level, False, between)
    for one, other in zip(packed, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert norms == pytest.approx(expected, rel=1e-5, nan_ok=True)


def test_gradients_are_copied_once_a_step() -> None:
    entries = sum(p.numel() for p in mlp().parameters())
    assert 2 * entries <= trained("O4", None)[2] < 2.1 * entries  # and parameters, and some norms


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
