"""A model that is loaded without a session gets the masters' float32 values."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preamp
from preamp import checkpoint


class Net(nn.Module):
    """An embedding whose weight is tied to the output's, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 5)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def trained(level: str, make: Any, *models: Any) -> tuple[Any, Any]:
    given: Any = dict(models) if models else Net()
    every = list(given.values()) if models else [given]
    optimizer = make([p for model in every for p in model.parameters()])
    session = preamp.prepare(given, optimizer, level=level)
    for _ in range(3):
        with session.autocast():
            loss = sum(model(torch.arange(5)).float().square().mean() for model in every)
        session.backward(loss)
        session.step()
        session.zero_grad()
    return given, session


def true(model: nn.Module, session: preamp.Session) -> dict[str, Tensor]:
    with session.full_precision(values_only=True):
        return {name: value.clone() for name, value in model.state_dict().items()}


def equal(model: nn.Module, wanted: dict[str, Tensor]) -> bool:
    state = model.state_dict()
    return state.keys() == wanted.keys() and all(torch.equal(state[name], wanted[name]) for name in wanted)


MAKERS = {
    "torch": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "float32": lambda p: preamp.optim.AdamW(p, lr=1e-2),
    "split": lambda p: preamp.optim.AdamW(p, lr=1e-2, master="split"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("later", [False, True])
def test_the_values_are_those_of_the_masters(tmp_path: Path, kind: str, level: str, later: bool) -> None:
    if kind == "split" and level == "O2":
        pytest.skip("bfloat16 only")
    model, session = trained(level, MAKERS[kind])
    if later:
        checkpoint.save_async(tmp_path / "a.pt", model=model, session=session).result()
    else:
        checkpoint.save(tmp_path / "a.pt", model=model, session=session)
    wanted, low = true(model, session), copy.deepcopy(model.state_dict())
    session.close()
    fresh, narrow = Net(), Net().to(torch.bfloat16)
    checkpoint.load(tmp_path / "a.pt", model=fresh)
    assert equal(fresh, wanted)
    checkpoint.load(tmp_path / "a.pt", model=narrow)
    for name, value in narrow.state_dict().items():
        assert value.dtype is torch.bfloat16
        assert torch.equal(value, (low if level == "O5" and kind != "split" else wanted)[name].to(torch.bfloat16))


def test_under_the_names_of_wrappers(tmp_path: Path) -> None:
    model, session = trained("O5", MAKERS["torch"])
    wrapped = nn.DataParallel(torch.compile(model, backend="eager"))
    checkpoint.save(tmp_path / "a.pt", model=wrapped, session=session)
    wanted = true(wrapped, session)
    fresh = nn.DataParallel(torch.compile(Net(), backend="eager"))
    checkpoint.load(tmp_path / "a.pt", model=fresh)
    assert equal(fresh, wanted)
    session.close()


def test_of_several_models(tmp_path: Path) -> None:
    models, session = trained("O5", MAKERS["torch"], ("a", Net()), ("b", Net()))
    checkpoint.save(tmp_path / "a.pt", model={"b": models["a"], "a": models["b"]}, session=session)
    wanted = {name: true(models[name], session) for name in "ab"}
    fresh = {"a": Net(), "b": Net()}
    checkpoint.load(tmp_path / "a.pt", model=fresh)
    assert equal(fresh["a"], wanted["b"]) and equal(fresh["b"], wanted["a"])
    session.close()


def test_into_a_model_of_a_session_that_is_not_told(tmp_path: Path) -> None:
    """Its weights round the masters, and the next step says so; told of the session, all is exact."""
    model, session = trained("O5", MAKERS["torch"])
    checkpoint.save(tmp_path / "a.pt", model=model, session=session)
    other, another = trained("O5", MAKERS["torch"])

    def step() -> None:
        another.backward(other(torch.arange(5)).float().square().sum())
        another.step()
        another.zero_grad()

    step()
    checkpoint.load(tmp_path / "a.pt", model=other)
    assert equal(other, model.state_dict())
    with pytest.warns(preamp.PreampWarning, match="in 16 bits"):
        step()
    checkpoint.load(tmp_path / "a.pt", model=other, session=another)
    wanted = true(model, session)
    assert all(torch.equal(value, wanted[name]) for name, value in true(other, another).items())
    session.close()
    another.close()


def test_of_an_average_there_are_no_masters(tmp_path: Path) -> None:
    model, session = trained("O5", MAKERS["torch"])
    average = Net().to(torch.bfloat16)
    checkpoint.save(tmp_path / "a.pt", model=average, session=session)
    fresh = Net()
    with pytest.warns(preamp.PreampWarning, match="of other weights"):
        checkpoint.load(tmp_path / "a.pt", model=fresh)
    assert equal(fresh, {name: value.float() for name, value in average.state_dict().items()})
    with session.full_precision(values_only=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.save(tmp_path / "a.pt", model=model, session=session)
        checkpoint.load(tmp_path / "a.pt", model=fresh)
    assert equal(fresh, true(model, session))
    session.close()
