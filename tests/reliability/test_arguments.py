"""Arguments that `checkpoint` has no use for are refused in one sentence, and nothing is written or changed before."""

from __future__ import annotations

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
    checkpoint.load(tmp_path / "a.pt", session=session)
    session.close()


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
        with pytest.raises(CheckpointError, match=r"^model= is a NoneType"):
            call(tmp_path / "b", model=None, optimizer=run.optimizer)
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert alike(run.state(), before)


def test_classes_for_objects(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a.pt", model=nn.Linear(2, 2), schedule={"a": 1})
    with pytest.raises(CheckpointError, match=r"schedule is the class Linear"):
        checkpoint.save(tmp_path / "b.pt", model=nn.Linear(2, 2), schedule=nn.Linear)
    with pytest.raises(CheckpointError, match=r"schedule= .* the class Linear"):
        checkpoint.load(tmp_path / "a.pt", schedule=nn.Linear)


def test_what_is_no_session_has_no_scale() -> None:
    with pytest.raises(CheckpointError, match=r"^session= is a Linear"):
        checkpoint.adopt_scale(nn.Linear(2, 2), {"loss_scale": 2.0, "unskipped": 1})  # type: ignore[arg-type]


def test_what_is_no_model_is_not_exported(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    run = Run("O4")
    for wrong in (run.optimizer, run.model.state_dict(), None, [run.model], "x", nn.Linear):
        with pytest.raises(CheckpointError, match=r"^model= is"):
            checkpoint.export(tmp_path / "a", wrong)
    for metadata in ({"a": 1}, {1: "a"}, "x", [("a", "b")]):
        with pytest.raises(CheckpointError, match=r"^metadata="):
            checkpoint.export(tmp_path / "a", run.model, metadata=metadata)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", [None, 3, b"a.pt", io.BytesIO(), "a\0b"])
def test_what_is_no_path(path: Any) -> None:
    run = Run("O4")
    for call in (*SAVES.values(), checkpoint.load, checkpoint.load_sharded):
        with pytest.raises(CheckpointError, match=r"path of a file or folder"):
            call(path, **run.objects)
    pytest.importorskip("safetensors")
    with pytest.raises(CheckpointError, match=r"path of a file or folder"):
        checkpoint.export(path, run.model)


def test_a_folder_is_read_by_load_sharded(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is a folder.*load_sharded"):
        checkpoint.load(tmp_path)
    (tmp_path / "a.pt").write_text("")
    with pytest.raises(NotADirectoryError):
        checkpoint.load(tmp_path / "a.pt" / "b.pt")


@pytest.mark.parametrize("wrong", ["moon", "cuda:99", torch.device("cuda", 99), 3, ["cpu"], {"cpu": "moon"}], ids=str)
def test_devices_that_are_not_there(tmp_path: Path, wrong: Any) -> None:
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path / "a.pt", model=model)
    with pytest.raises(CheckpointError, match=r"^map_location="):
        checkpoint.load(tmp_path / "a.pt", model=model, map_location=wrong)
    for right in ("cpu", torch.device("cpu"), None, {"cpu": "cpu"}, lambda storage, _: storage):
        checkpoint.load(tmp_path / "a.pt", model=model, map_location=right)
