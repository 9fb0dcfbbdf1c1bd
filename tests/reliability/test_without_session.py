"""What is saved of a prepared model, and loaded into one, are its float32 values, with its session and without."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preamp
from preamp import checkpoint

from ..session.toys import squares
from .runs import alike


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
    "split24": lambda p: preamp.optim.AdamW(p, lr=1e-2, master="split24"),
}


CASES = [("O1", "torch"), ("O2", "torch"), ("O2", "float32"), *(("O5", kind) for kind in MAKERS)]


def test_of_several_models(tmp_path: Path) -> None:
    models, session = trained("O5", MAKERS["torch"], ("a", Net()), ("b", Net()))
    checkpoint.save(tmp_path / "a.pt", model={"b": models["a"], "a": models["b"]}, session=session)
    wanted = {name: true(models[name], session) for name in "ab"}
    fresh = {"a": Net(), "b": Net()}
    checkpoint.load(tmp_path / "a.pt", model=fresh)
    assert equal(fresh["a"], wanted["b"]) and equal(fresh["b"], wanted["a"])
    session.close()


def equal_in_full(model: nn.Module, session: preamp.Session, wanted: dict[str, Tensor]) -> bool:
    found = true(model, session)
    return all(torch.equal(found[name], wanted[name]) for name in wanted)


def bare(model: nn.Module) -> nn.Module:
    return model


def wrapped(model: nn.Module) -> nn.Module:
    compiled = torch.compile(model, backend="eager")
    return compiled if torch.cuda.is_available() else nn.DataParallel(compiled)  # which would move it to the GPU


@pytest.mark.parametrize(("around", "saved_with"), [(bare, True), (wrapped, True), (bare, False), (wrapped, False)])
@pytest.mark.parametrize(("level", "kind"), CASES)
def test_a_prepared_model_is_its_masters(tmp_path: Path, kind: str, level: str, around: Any, saved_with: bool) -> None:
    """Saved and loaded without its session as with it."""
    model, session = trained(level, MAKERS[kind])
    low, wanted = copy.deepcopy(model.state_dict()), true(model, session)
    checkpoint.save(tmp_path / "a.pt", model=around(model), session=session if saved_with else None)
    assert equal(model, low)
    assert equal_in_full(model, session, wanted)
    session.close()
    other, another = trained(level, MAKERS[kind])
    with torch.no_grad():
        other.first.weight.mul_(2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*16.bit")
        warnings.simplefilter("ignore", preamp.PreampWarning) if saved_with else None
        checkpoint.load(tmp_path / "a.pt", model=around(other))
    assert equal(other, low)
    assert equal_in_full(other, another, wanted)
    another.close()
    assert equal(other, wanted)
    plain, narrow = Net(), Net().to(torch.bfloat16)
    for fresh in (plain, narrow):
        checkpoint.load(tmp_path / "a.pt", model=around(fresh))
    assert equal(plain, wanted)
    # The split keeps a weight's upper half, which is not the nearest bfloat16.
    nearest = low if level == "O5" and kind != "split" else wanted
    assert equal(narrow, {name: value.to(torch.bfloat16) for name, value in nearest.items()})


def test_masters_of_a_session_beside_the_one_that_is_saved(tmp_path: Path) -> None:
    models, sessions = zip(*(trained("O5", MAKERS[kind]) for kind in ("torch", "split")), strict=True)
    checkpoint.save(tmp_path / "a.pt", model=dict(zip("ab", models, strict=True)), session=sessions[0])
    wanted = [true(*pair) for pair in zip(models, sessions, strict=True)]
    fresh = {"a": Net(), "b": Net()}
    checkpoint.load(tmp_path / "a.pt", model=fresh)
    assert equal(fresh["a"], wanted[0]) and equal(fresh["b"], wanted[1])
    with torch.no_grad():
        for model in models:
            model.first.weight.mul_(3)
    checkpoint.load(tmp_path / "a.pt", model=dict(zip("ab", models, strict=True)), session=sessions[0])
    for pair, state in zip(zip(models, sessions, strict=True), wanted, strict=True):
        assert equal_in_full(*pair, state)
        pair[1].close()


@pytest.mark.parametrize(("level", "kind"), CASES)
def test_a_save_anywhere_in_a_step_changes_nothing(tmp_path: Path, level: str, kind: str) -> None:
    ends = []
    for saves in (False, True):
        model, session = trained(level, MAKERS[kind])
        optimizer = session.optimizers[""]

        def saved(model: Any = model, optimizer: Any = optimizer, session: Any = session, saves: bool = saves) -> None:
            if saves:
                checkpoint.save(tmp_path / "a.pt", model=model, optimizer=optimizer, session=session)

        for step in range(4):
            for last in (False, True):
                squares(session, model, torch.arange(5), sync=last)
                saved()
            if step % 2:
                session.unscale_()
                saved()
            session.clip_grad_norm_(0.01)
            saved()
            session.step()
            saved()
            session.zero_grad()
        ends.append([true(model, session), copy.deepcopy(optimizer.state_dict()["state"])])
        session.close()
    assert alike(*ends)


class Copies(nn.Linear):
    """Gives copies of its weights for a state."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value.detach().clone() for name, value in super().state_dict(*args, **kwargs).items()}


def test_a_model_that_copies_its_weights_is_saved_in_float32(tmp_path: Path) -> None:
    model = Copies(4, 4)
    session = preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level="O5")
    wanted = session.state_dict()["masters"]
    checkpoint.save(tmp_path / "a.pt", model=model, session=session)
    assert alike(checkpoint.load(tmp_path / "a.pt")["model"], wanted)
    assert wanted["weight"].dtype is torch.float32
    session.close()


class Refuses:
    """Does not accept what it has saved."""

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int], seen: list[int] = []) -> None:  # noqa: B006
        seen.append(1)
        if len(seen) % 2:
            raise ValueError("no")


@pytest.mark.parametrize("kind", MAKERS)
def test_a_prepared_model_gets_back_the_masters_that_it_had(tmp_path: Path, kind: str) -> None:
    model, session = trained("O5", MAKERS[kind])
    checkpoint.save(tmp_path / "a.pt", model=model, other=Refuses())
    with torch.no_grad(), session.full_precision(values_only=True):
        model.first.weight.mul_(1.001)
    wanted = true(model, session)
    with pytest.raises(preamp.errors.CheckpointError, match="nothing was loaded"):
        checkpoint.load(tmp_path / "a.pt", model=model, other=Refuses())
    assert equal_in_full(model, session, wanted)
    session.close()


def test_a_model_in_16_bits_is_taken_as_it_is(tmp_path: Path) -> None:
    """Into masters, too: there are no better values of it."""
    model, session = trained("O5", MAKERS["torch"])
    checkpoint.save(tmp_path / "a.pt", model=Net().to(torch.bfloat16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.load(tmp_path / "a.pt", model=model)
    assert equal_in_full(model, session, Net().to(torch.bfloat16).float().state_dict())
    session.close()


def test_an_average_beside_the_model(tmp_path: Path) -> None:
    model, session = trained("O5", MAKERS["torch"])
    average = copy.deepcopy(Net()).to(torch.bfloat16)
    with session.full_precision(values_only=True):
        checkpoint.save(tmp_path / "a.pt", model=model, session=session, average=average)
        wanted = copy.deepcopy(model.state_dict())
    fresh, low = Net(), Net().to(torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.load(tmp_path / "a.pt", model=fresh, average=low)
    assert equal(fresh, wanted) and equal(low, average.state_dict())
    session.close()


def of_apex() -> dict[str, Any]:
    return {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 3}}


@pytest.mark.parametrize("amp", ["session", "apex"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("prepared", [True, False])
def test_a_scale_that_is_left_in_the_file_is_told(tmp_path: Path, level: str, amp: str, prepared: bool) -> None:
    """Where a run goes on from it: with an optimizer, or in a prepared model."""
    model, session = trained(level, MAKERS["torch"])
    optimizer = session.optimizers[""]
    given: dict[str, Any] = {"session": session} if amp == "session" else {"amp": of_apex()}
    checkpoint.save(tmp_path / "a.pt", model=model, optimizer=optimizer, **given)
    checkpoint.save(tmp_path / "plain.pt", model=model, optimizer=optimizer)
    if not prepared:
        session.close()
    wanted = r"after 3 steps.*give session=session" if amp == "session" else "a loss scaler.*DynamicScale"
    for objects in ({"model": model, "optimizer": optimizer}, {"optimizer": optimizer}, {"model": model}):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            checkpoint.load(tmp_path / "plain.pt", **objects)
            assert not seen
            checkpoint.load(tmp_path / "a.pt", **objects)
        told = [each for each in seen if re.search(wanted, str(each.message))]
        assert len(told) == len(seen) == (prepared or "optimizer" in objects)
        assert all(each.filename == __file__ and each.category is preamp.PreampWarning for each in told)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.load(tmp_path / "a.pt")
        checkpoint.load(tmp_path / "a.pt", optimizer=optimizer, amp=Keeps())
        if prepared and amp == "session":
            checkpoint.load(tmp_path / "a.pt", model=model, optimizer=optimizer, session=session)
    session.close()


class Keeps:
    """Takes any state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass
