"""State: resume bit for bit, load in any order, refuse what does not fit; and close().

States that are loaded into a prepared model while its session goes on.
"""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import preamp
from preamp.errors import PolicyError, PreampWarning, SessionError, StateError

from .. import forks
from ..rows import over
from .toys import LEVELS, loss_of, mlp, same, step, train, weights


def prepared(level: str, kind: str = "torch") -> tuple[nn.Sequential, torch.optim.Optimizer, preamp.Session]:
    model = mlp()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if kind == "split":
        optimizer = preamp.optim.AdamW(model.parameters(), 0.1, eps=1e-4, master="split")
    return model, optimizer, preamp.prepare(model, optimizer, level=level, scale=2.0)


LOADERS: dict[str, Callable[[nn.Sequential, nn.Sequential], object]] = {
    "the whole": lambda model, other: model.load_state_dict(other.state_dict()),
    "in float64": lambda model, other: model.load_state_dict(
        {name: value.double() for name, value in other.state_dict().items()}
    ),
    "a part": lambda model, other: [
        mine.load_state_dict(of.state_dict()) for mine, of in zip(model, other, strict=True)
    ],
    "a wrapper": lambda model, other: nn.Sequential(model).load_state_dict(nn.Sequential(other).state_dict()),
    "compiled": lambda model, other: torch.compile(model, backend="aot_eager").load_state_dict(
        torch.compile(other, backend="aot_eager").state_dict()
    ),
    "one by one": lambda model, other: [
        model.load_state_dict({name: value}, strict=False) for name, value in other.state_dict().items()
    ],
}


@pytest.mark.parametrize(("level", "kind"), [*((level, "torch") for level in LEVELS if level != "O3"), ("O5", "split")])
def test_whatever_a_float32_state_is_loaded_through_masters_take_it_whole(level: str, kind: str) -> None:
    pretrained = mlp(3)
    for through, load in LOADERS.items():
        model, _, session = prepared(level, kind)
        train(session, model, [0])
        dtypes = [p.dtype for p in model.parameters()]
        load(model, pretrained)
        assert [p.dtype for p in model.parameters()] == dtypes, through
        for mine, theirs in zip(model.parameters(), pretrained.parameters(), strict=True):
            assert torch.equal(mine, theirs.to(mine.dtype)), through
        session.close()
        assert same(weights(model), weights(pretrained)), through


def test_torch_loads_by_itself_once_there_are_no_masters(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("""
import gc, preamp, torch
torchs = torch.nn.Module._load_from_state_dict
def prepared(level):
    model = torch.nn.Linear(2, 2)
    return preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level)
first, second, lost = prepared("O2"), prepared("O5"), prepared("O5")
first.close()
second.close()
assert torch.nn.Module._load_from_state_dict is not torchs
del lost
gc.collect()
assert torch.nn.Module._load_from_state_dict is torchs
""")
    done = forks.run(["script.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_load_that_fails_leaves_16_bit_parameters(level: str) -> None:
    model, _, session = prepared(level)
    dtypes = [p.dtype for p in model.parameters()]
    for state in ({"0.weight": torch.zeros(16, 6)}, {**mlp().state_dict(), "3.weight": torch.zeros(1)}):
        with pytest.raises(RuntimeError):
            model.load_state_dict(state)
        assert [p.dtype for p in model.parameters()] == dtypes
    train(session, model, [0])
    session.close()


@pytest.mark.parametrize(("level", "kind"), [("O2", "torch"), ("O5", "torch"), ("O5", "split")])
def test_going_back_by_16_bit_values_is_told(level: str, kind: str) -> None:
    """As fastai's lr_find does: it saves the model, tries learning rates, and loads it."""
    model, _, session = prepared(level, kind)
    train(session, model, [0])
    saved = copy.deepcopy(model.state_dict())
    train(session, model, [0])
    model.load_state_dict(saved)
    with pytest.warns(PreampWarning, match=r"loaded from a state that has them in 16 bits.*session\.state_dict\(\)"):
        train(session, model, [0])
    train(session, model, [0])  # once
    session.close()


@over(level=LEVELS, first=["model", "session"])
def test_a_write_after_a_load_is_not_taken_for_it(level: str, first: str) -> None:
    """Nor one after any other load; warnings are errors here."""
    model, _, session = prepared(level)
    train(session, model, range(2))
    states = copy.deepcopy({"model": model.state_dict(), "session": session.state_dict()})
    train(session, model, [2])
    for name in (first, *states.keys() - {first}):
        {"model": model, "session": session}[name].load_state_dict(states[name])  # type: ignore[attr-defined]
    for at in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.75)
        train(session, model, [at])
    session.close()


@over(kept=[*((level, "torch") for level in LEVELS), ("O5", "split")],
      order=["model, optimizer, session", "session, optimizer, model", "in full precision"])  # fmt: skip
def test_the_ways_to_go_back_that_lose_nothing_are_silent(kept: tuple[str, str], order: str) -> None:
    level, kind = kept

    def run(away: bool) -> list[Tensor]:
        model, optimizer, session = prepared(level, kind)
        train(session, model, range(2))
        if away and order == "in full precision":
            with session.full_precision(values_only=True):
                of_model = copy.deepcopy(model.state_dict())
        else:
            of_model = copy.deepcopy(model.state_dict())
        states = {"model": of_model, "optimizer": optimizer.state_dict(), "session": session.state_dict()}
        states = copy.deepcopy(states)
        if away:
            train(session, model, range(3))
            if order == "in full precision":
                with session.full_precision(values_only=True):
                    model.load_state_dict(of_model)
                optimizer.load_state_dict(states["optimizer"])
            else:
                parts = {"model": model, "optimizer": optimizer, "session": session}
                for name in order.split(", "):
                    parts[name].load_state_dict(states[name])  # type: ignore[attr-defined]
        train(session, model, [0])
        session.close()
        return weights(model)

    assert level == "O3" or same(run(True), run(False))


@pytest.mark.parametrize("level", LEVELS)
def test_states_load_in_any_order(level: str) -> None:
    def fresh(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, preamp.Session]:
        model = mlp(seed)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4)
        return model, optimizer, preamp.prepare(model, optimizer, level=level)

    model, optimizer, session = fresh(0)
    for index in range(5):
        step(session, model, index, factor=float("inf") if index == 3 else 1.0)
    buffer = io.BytesIO()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "session": session.state_dict()}, buffer
    )
    train(session, model, range(5, 10))
    expected, masters = weights(model), session.state_dict()["masters"]
    session.close()
    for order in itertools.permutations(("model", "optimizer", "session")):
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
        model, optimizer, session = fresh(1)
        train(session, model, range(20, 22))  # state of another life, to be overwritten
        for what in order:
            {"model": model, "optimizer": optimizer, "session": session}[what].load_state_dict(saved[what])
        train(session, model, range(5, 10))
        assert same(weights(model), expected), order
        for name, master in session.state_dict()["masters"].items():
            assert torch.equal(master, masters[name]), name
        session.close()


@over(level=LEVELS, kind=("torch", "split"), frozen=("weights that were trained", "none"))
def test_a_run_that_froze_or_thawed_weights_is_resumed(level: str, kind: str, frozen: str) -> None:
    """The state has masters of weights that are frozen in the run that takes it, until they are trained again."""
    if kind == "split" and level != "O5":
        return
    model, optimizer, session = prepared(level, kind)
    train(session, model, range(3))
    states = copy.deepcopy([model.state_dict(), optimizer.state_dict(), session.state_dict()])
    session.close()

    def resume(freeze: bool) -> list[Tensor]:
        model = mlp(1).requires_grad_(not freeze)
        model[-1].requires_grad_(True)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if kind == "split":
            optimizer = preamp.optim.AdamW(model.parameters(), 0.1, eps=1e-4, master="split")
        with preamp.prepare(model, optimizer, level=level, scale=2.0) as session:
            for part, state in zip((model, optimizer, session), copy.deepcopy(states), strict=True):
                part.load_state_dict(state)
            model.requires_grad_(True)
            train(session, model, range(3, 6))
        return weights(model)

    assert same(resume(frozen != "none"), resume(False))


@pytest.mark.parametrize("level", LEVELS)
def test_close_gives_everything_back(level: str) -> None:
    model = mlp()
    model.register_buffer("table", torch.randn(5))
    table = model.table
    before = weights(model)
    classes = [type(m) for m in model.modules()]
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-4)
    keys = set(optimizer.__dict__)
    session = preamp.prepare(model, optimizer, level=level)
    session.close()
    assert [type(m) for m in model.modules()] == classes
    assert same(weights(model), before) or level == "O3"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.table is table
    assert set(optimizer.__dict__) == keys
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert all("_preamp_casting" not in m.__dict__ for m in model.modules())
    loss_of(model, 0).backward()
    optimizer.step()


def test_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = preamp.prepare(model, optimizer, level="O2")
    train(session, model, range(2))
    good = copy.deepcopy(session.state_dict())
    before = weights(model)

    def broken(**changes):
        return {**copy.deepcopy(good), **changes}

    masters = dict(good["masters"])
    masters["extra"] = masters.pop("0.weight")
    for state, message in (
        ({}, "not a session's state"),
        (torch.amp.GradScaler("cpu").state_dict(), r"a scaler of torch.amp or Apex.*DynamicScale\(init_scale"),
        ({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 1}}, "a scaler of torch.amp or Apex"),
        (broken(version=99), "version 99"),
        (broken(policy="O1"), "policy"),
        (broken(masters=masters), "missing .*0.weight"),
        (broken(masters={**good["masters"], "0.weight": torch.zeros(2)}), "shape"),
        (broken(losses={"other": {}}), "losses"),
        (broken(losses={"loss": {"kind": "static"}}), "static"),
    ):
        with pytest.raises(StateError, match=message):
            session.load_state_dict(state)
    assert same(weights(model), before)
    assert str(session.state_dict()) == str(good)
    session.load_state_dict(good)
    session.close()


def test_a_policy_that_does_not_fit_changes_nothing() -> None:
    model = mlp()
    before = weights(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for bad, message in (
        ("O2; nowhere -> full", "no module matches 'nowhere'"),
        (r"O2; \d -> full; [03] -> low", "matches several rules"),
    ):
        with pytest.raises(PolicyError, match=message):
            preamp.prepare(model, optimizer, policy=bad)
    model[3].half()
    with pytest.raises(PolicyError, match=r"3\.weight is fp16"):
        preamp.prepare(model, optimizer, level="O5")
    model[3].float()
    for args in ((object(), optimizer), (model, object()), (model, [optimizer, optimizer]), ([], optimizer)):
        with pytest.raises(SessionError):
            preamp.prepare(*args, level="O2")
    assert [p.dtype for p in model.parameters()] == [b.dtype for b in before]
