"""States of optimizers that are not those of the parameters they would be loaded for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import preamp
from preamp import checkpoint
from preamp.errors import CheckpointError, OptimizerError


class Old(nn.Module):
    """Two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Linear(8, width)
        self.b = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x))
        return out


class New(Old):
    """The same two, made in another order."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self._modules = dict(reversed(self._modules.items()))  # type: ignore[assignment]


def of(kind: str) -> Callable[[Any], Any]:
    library, name = kind.split(".")
    options: dict[str, Any] = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    return lambda params: getattr(torch.optim if library == "torch" else preamp.optim, name)(params, lr=1e-3, **options)


def train(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> None:
    torch.manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 8)).pow(2).mean().backward()
        optimizer.step()


TORCHS = (
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
OURS = ("Adagrad", "Adam", "AdamW", "LAMB", "Lion", "NovoGrad", "SGD")
KINDS = [*(f"torch.{name}" for name in TORCHS), *(f"preamp.{name}" for name in OURS)]


@pytest.mark.parametrize("width", [32, 4000])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_in_another_order(tmp_path: Path, kind: str, width: int) -> None:
    model = Old(width)
    optimizer = of(kind)(model.parameters())
    train(model, optimizer)
    checkpoint.save(tmp_path / "a.pt", model=model, optimizer=optimizer)
    other = New(width)
    fresh = of(kind)(other.parameters())
    before = copy.deepcopy([other.state_dict(), fresh.state_dict()])
    with pytest.raises(CheckpointError, match=r"nothing was loaded.*order"):
        checkpoint.load(tmp_path / "a.pt", model=other, optimizer=fresh)
    assert str(before) == str([other.state_dict(), fresh.state_dict()])
    same = Old(width)
    again = of(kind)(same.parameters())
    checkpoint.load(tmp_path / "a.pt", model=same, optimizer=again)
    train(same, again)
    train(model, optimizer)
    assert all(map(torch.equal, same.parameters(), model.parameters()))


@pytest.mark.parametrize("kind", ["torch.AdamW", "preamp.AdamW"])
def test_layers_of_another_width(tmp_path: Path, kind: str) -> None:
    model, other = Old(32), Old(24)
    optimizer, fresh = (of(kind)(each.parameters()) for each in (model, other))
    train(model, optimizer)
    checkpoint.save(tmp_path / "a.pt", model=model, optimizer=optimizer)
    train(other, fresh, steps=1)
    before = copy.deepcopy([other.state_dict(), fresh.state_dict()])
    with pytest.raises(CheckpointError, match="nothing was loaded"):
        checkpoint.load(tmp_path / "a.pt", model=other, optimizer=fresh)
    assert str(before) == str([other.state_dict(), fresh.state_dict()])
    train(other, fresh)


@pytest.mark.parametrize("level", ["O2", "O4", "O5"])
def test_in_a_session(tmp_path: Path, level: str) -> None:
    runs = []
    for kind in (Old, New):
        model = kind(32)
        optimizer = preamp.optim.AdamW(model.parameters(), 1e-3)
        session = preamp.prepare(model, optimizer, level=level)
        runs.append({"model": model, "optimizer": optimizer, "session": session})
        with session.autocast():
            loss = model(torch.ones(2, 8)).float().pow(2).mean()
        session.backward(loss)
        session.step()
    checkpoint.save(tmp_path / "a.pt", **runs[0])
    before = copy.deepcopy([thing.state_dict() for thing in runs[1].values()])
    with pytest.raises(CheckpointError, match="nothing was loaded"):
        checkpoint.load(tmp_path / "a.pt", **runs[1])
    assert str(before) == str([thing.state_dict() for thing in runs[1].values()])
    for run in runs:
        run["session"].close()


class Odd(Optimizer):
    """An optimizer of somebody's own that keeps what it likes."""

    def __init__(self, params: Any, make: Callable[[Tensor], Any]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.make = make

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing but its states."""
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["exp_avg"] = self.make(p)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.zeros(()), lambda p: torch.zeros(3, *p.shape[1:]), lambda p: torch.zeros(p.numel()),
        lambda p: [torch.zeros(2), {"k": 1}], lambda p: p.new_zeros(2, *p.shape), lambda p: torch.zeros(7), lambda p: 5,
    ],
    ids=["scalar", "projected", "flat", "nested", "two of them", "alike for all", "number"],
)  # fmt: skip
def test_odd_states_of_other_optimizers_load(tmp_path: Path, make: Callable[[Tensor], Any]) -> None:
    model = Old(32)
    optimizer = Odd(model.parameters(), make)
    optimizer.step()
    checkpoint.save(tmp_path / "a.pt", model=model, optimizer=optimizer)
    for kind in (Old, New):
        other = kind(32)
        fresh = Odd(other.parameters(), make)
        checkpoint.load(tmp_path / "a.pt", model=other, optimizer=fresh)
        assert len(fresh.state) == 4


def test_other_optimizers_states_in_another_order(tmp_path: Path) -> None:
    model, other = Old(32), New(32)
    optimizer = Odd(model.parameters(), torch.zeros_like)
    optimizer.step()
    checkpoint.save(tmp_path / "a.pt", model=model, optimizer=optimizer)
    with pytest.raises(CheckpointError, match="order"):
        checkpoint.load(tmp_path / "a.pt", model=other, optimizer=Odd(other.parameters(), torch.zeros_like))


@pytest.mark.parametrize("states", ["float32", "8bit"])
@pytest.mark.parametrize("master", ["float32", "split"])
def test_states_in_8_bits_and_masters(states: str, master: str) -> None:
    def made(model: nn.Module) -> Any:
        return preamp.optim.AdamW(model.parameters(), 1e-3, states=states, master=master)

    model = Old(800).bfloat16()
    optimizer = made(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    saved = optimizer.state_dict()
    for load_as in ("float32", "8bit"):
        twin = Old(800).bfloat16()
        preamp.optim.AdamW(twin.parameters(), 1e-3, states=load_as, master=master).load_state_dict(saved)
        with pytest.raises(OptimizerError, match="order"):
            other = New(800).bfloat16()
            preamp.optim.AdamW(other.parameters(), 1e-3, states=load_as, master=master).load_state_dict(saved)
    for name in saved["state"][0].keys() - {"step"}:
        cut = copy.deepcopy(saved)
        cut["state"][0][name] = cut["state"][0][name].flatten()[:3]
        with pytest.raises(OptimizerError, match=name):
            optimizer.load_state_dict(cut)
    cut = copy.deepcopy(saved)
    cut["state"][0]["step"] = torch.ones(3)
    with pytest.raises(OptimizerError, match="step"):
        optimizer.load_state_dict(cut)
