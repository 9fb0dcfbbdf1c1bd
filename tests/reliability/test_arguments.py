"""Arguments that `checkpoint` has no use for are refused in one sentence, and nothing is written or changed before."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from preamp import checkpoint
from preamp.errors import CheckpointError

from .runs import Run, alike

SAVES: dict[str, Callable[..., Any]] = {
    "save": checkpoint.save, "save_async": checkpoint.save_async, "save_sharded": checkpoint.save_sharded,
    "save_sharded_async": checkpoint.save_sharded_async,
}  # fmt: skip


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("level", ["O1", "O5"])
def test_the_session_of_another_model(tmp_path: Path, level: str, sharded: bool) -> None:
    own, other = Run(level), Run(level, seed=1)
    own.steps(0)
    other.steps(0, 1)
    saves = [call for name, call in SAVES.items() if ("sharded" in name) is sharded]
    load: Any = checkpoint.load_sharded if sharded else checkpoint.load
    for save in saves:
        with pytest.raises(CheckpointError, match=r"prepared for other models"):
            save(tmp_path / "a", model=own.model, optimizer=own.optimizer, session=other.session)
    assert not list(tmp_path.iterdir())
    saves[0](tmp_path / "a", **own.objects)
    before = own.state(), other.state()
    for swapped in ("session", "model", "optimizer"):
        with pytest.raises(CheckpointError, match=r"prepared for other models"):
            load(tmp_path / "a", **{**own.objects, swapped: other.objects[swapped]})
    assert alike([own.state(), other.state()], list(before))


def test_sessions_of_a_part_of_a_wrapped_and_of_more_models(tmp_path: Path) -> None:
    parts = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
    optimizers = {name: torch.optim.SGD(part.parameters(), 0.1) for name, part in parts.items()}
    session = preamp.prepare(parts, optimizers, level="O5")
    whole = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.DataParallel(parts["a"]), backend="eager"))
    for model in (whole, parts, parts["b"], [nn.Linear(2, 2), whole], nn.ModuleList(parts.values())):
        checkpoint.save(tmp_path / "a.pt", model=model, optimizer=optimizers["a"], session=session)
        checkpoint.load(tmp_path / "a.pt", model=model, optimizer=optimizers["a"], session=session)
    session.close()


def test_masters_are_with_the_models_or_with_the_session(tmp_path: Path) -> None:
    """Those of models that are not saved are in the session's state; none is left where nobody looks for it."""
    parts = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
    optimizer = torch.optim.SGD([p for part in parts.values() for p in part.parameters()], 0.1)
    with preamp.prepare(parts, optimizer, level="O5") as session:
        checkpoint.save(tmp_path / "a.pt", model=parts["a"], session=session)
        wanted = {name: master.clone() for name, master in session.state_dict()["masters"].items()}
        with torch.no_grad(), session.full_precision():
            for parameter in (*parts["a"].parameters(), *parts["b"].parameters()):
                parameter.mul_(3)
        before = alike_state(session)
        for given in ({}, {"model": parts["b"]}):
            with pytest.raises(CheckpointError, match=r"masters \(.*Give load\(\) the models"):
                checkpoint.load(tmp_path / "a.pt", **given, session=session)
            assert alike(alike_state(session), before)
        content = checkpoint.load(tmp_path / "a.pt", model=parts["a"], session=session)
        assert content["amp"]["masters"].keys() == {"b:weight", "b:bias"}
        assert alike(session.state_dict()["masters"], wanted)
        assert all(torch.equal(p, wanted[f"b:{name}"].bfloat16()) for name, p in parts["b"].named_parameters())
        with pytest.raises(CheckpointError, match="give it as session="):
            checkpoint.save(tmp_path / "b.pt", model=parts["a"], amp=session)


def alike_state(session: preamp.Session) -> Any:
    return copy.deepcopy(session.state_dict())


def wrong_kinds(run: Run) -> dict[str, list[Any]]:
    model, optimizer, session = run.objects.values()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    neither = ["x", 3, nn.Linear, iter([model]), model.state_dict(), optimizer.state_dict(), schedule]
    return {
        "model": [optimizer, session, [model, [model]], {"a": None}, *neither],
        "optimizer": [model, session, [optimizer, [optimizer]], {"a": None}, *neither],
        "session": [model, optimizer, [session], session.state_dict(), *neither],
    }


@pytest.mark.parametrize("name", ["model", "optimizer", "session"])
def test_objects_of_another_kind(tmp_path: Path, name: str) -> None:
    run = Run("O4")
    checkpoint.save(tmp_path / "a.pt", **run.objects)
    checkpoint.save_sharded(tmp_path / "a", **run.objects)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    kinds = wrong_kinds(run)[name]
    before = run.state()
    for wrong in kinds:
        given = {**run.objects, name: wrong}
        for call in (*SAVES.values(), checkpoint.load, checkpoint.load_sharded):
            with pytest.raises(CheckpointError, match=f"^{name}="):
                call(tmp_path / ("a" if "sharded" in call.__name__ else "a.pt"), **given)
    for call in SAVES.values():
        with pytest.raises(CheckpointError, match=r"^model= is, or holds, a NoneType"):
            call(tmp_path / "b", model=None, optimizer=run.optimizer)
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert alike(run.state(), before)


def test_parameters_of_no_model_have_no_name_in_a_sharded_checkpoint(tmp_path: Path) -> None:
    model, temperature = nn.Linear(2, 2), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], 0.1)
    for call in (checkpoint.save_sharded, checkpoint.save_sharded_async, checkpoint.load_sharded):
        with pytest.raises(CheckpointError, match="a parameter that model= does not have"):
            call(tmp_path / "a", model, optimizer=optimizer)


def test_classes_for_objects(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a.pt", model=nn.Linear(2, 2), schedule={"a": 1})
    with pytest.raises(CheckpointError, match=r"schedule is the class Linear"):
        checkpoint.save(tmp_path / "b.pt", model=nn.Linear(2, 2), schedule=nn.Linear)
    with pytest.raises(CheckpointError, match=r"schedule= .* the class Linear"):
        checkpoint.load(tmp_path / "a.pt", schedule=nn.Linear)


@pytest.mark.parametrize("path", [None, 3, b"a.pt", io.BytesIO(), "a\0b"])
def test_what_is_no_path(path: Any) -> None:
    run = Run("O4")
    for call in (*SAVES.values(), checkpoint.load, checkpoint.load_sharded):
        with pytest.raises(CheckpointError, match=r"path of a file or folder"):
            call(path, **run.objects)


def test_a_folder_is_read_by_load_sharded(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is a folder.*load_sharded"):
        checkpoint.load(tmp_path)
    (tmp_path / "a.pt").write_text("")
    with pytest.raises(NotADirectoryError):
        checkpoint.load(tmp_path / "a.pt" / "b.pt")
