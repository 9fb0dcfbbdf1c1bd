"""Where a checkpoint is written: through links, with the permissions of what was there, and over nothing but files."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from preamp import checkpoint
from preamp.errors import CheckpointError

posix = pytest.mark.skipif(os.name != "posix", reason="permissions and special files of POSIX")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@posix
@pytest.mark.parametrize("wanted", [0o600, 0o640, 0o664])
def test_a_file_keeps_its_permissions(tmp_path: Path, wanted: int) -> None:
    path, model = tmp_path / "own.pt", nn.Linear(2, 2)
    checkpoint.save(path, model=model)
    path.chmod(wanted)
    checkpoint.save(path, model=model, again=1)
    assert mode(path) == wanted and checkpoint.load(path)["again"] == 1


@posix
def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "own.pt", model=nn.Linear(2, 2))
    (tmp_path / "other").write_text("")
    assert mode(tmp_path / "own.pt") == mode(tmp_path / "other")


@posix
def test_nobody_can_read_a_private_file_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "own.pt", []
    checkpoint.save(path, model=nn.Linear(2, 2))
    path.chmod(0o600)
    replace = os.replace

    def look(source: Any, target: Any) -> None:
        seen.append(mode(Path(source)))
        replace(source, target)

    def look_early(*arguments: Any, **options: Any) -> None:
        seen.extend(mode(entry) for entry in tmp_path.iterdir())
        torch_save(*arguments, **options)

    torch_save = torch.save
    monkeypatch.setattr(os, "replace", look)
    monkeypatch.setattr(torch, "save", look_early)
    checkpoint.save(path, model=nn.Linear(2, 2))
    assert seen == [0o600] * 3


@posix
def test_links_stay_and_lead_to_the_new_file(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    real, link, other = tmp_path / "there" / "real.pt", tmp_path / "link.pt", tmp_path / "other.pt"
    link.symlink_to(Path("there") / "real.pt")
    other.symlink_to(link)
    checkpoint.save(link, model=nn.Linear(2, 2), number=1)  # what it leads to is not there yet
    assert link.is_symlink() and checkpoint.load(real)["number"] == 1
    pending = checkpoint.save_async(other, model=nn.Linear(2, 2), number=2)
    assert checkpoint.load(real)["number"] == 2, "one file has to be waited for, whatever it is called"
    pending.result()
    assert link.is_symlink() and other.is_symlink() and not real.is_symlink()
    assert sorted(os.listdir(tmp_path / "there")) == ["real.pt"]
    assert sorted(os.listdir(tmp_path)) == ["link.pt", "other.pt", "there"]


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices")


@posix
@pytest.mark.filterwarnings("ignore:a checkpoint was not saved")
@pytest.mark.parametrize("make", [_fifo, _device])
@pytest.mark.parametrize("linked", [False, True])
def test_what_is_no_file_is_left_alone(tmp_path: Path, make: Callable[[Path], None], linked: bool) -> None:
    path = tmp_path / "special"
    make(path)
    before = path.stat()
    if linked:
        (tmp_path / "link").symlink_to(path)
    named = tmp_path / "link" if linked else path
    for save in (checkpoint.save, lambda *a, **k: checkpoint.save_async(*a, **k).result()):
        with pytest.raises(CheckpointError, match="is a device, a pipe or a socket"):
            save(named, model=nn.Linear(2, 2))
    assert (path.stat().st_mode, path.stat().st_ino) == (before.st_mode, before.st_ino)
    assert not [entry for entry in os.listdir(tmp_path) if entry.endswith(".tmp")]


def test_threads_that_save_to_a_link_and_to_its_file(tmp_path: Path) -> None:
    real, link = tmp_path / "real.pt", tmp_path / "link.pt"
    link.symlink_to(real)
    failed: list[BaseException] = []

    def work(path: Path) -> None:
        try:
            for number in range(5):
                checkpoint.save(path, model=nn.Linear(2, 2), number=number)
                checkpoint.load(path)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(path,)) for path in (real, link, link)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and sorted(os.listdir(tmp_path)) == ["link.pt", "real.pt"]


# -- sharded checkpoints


def _parts(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 4)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}


def test_save_sharded_deletes_nothing_that_is_not_its_own(tmp_path: Path) -> None:
    others = ("1000", "2024", "00000001", "preamp", "preamp-3", "preamp-00000003 (copy)")
    for name in others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious.txt").write_text("months of work")
    (tmp_path / "0007").write_text("a file")
    (tmp_path / "preamp-00000007").symlink_to(tmp_path / "1000")
    parts = _parts()
    for number in (1, 2, 3):
        checkpoint.save_sharded(tmp_path, **parts)
        assert [(tmp_path / name / "precious.txt").read_text() for name in others] == ["months of work"] * len(others)
        own = f"preamp-{number:08d}"
        assert sorted(os.listdir(tmp_path)) == sorted([*others, "0007", "preamp-00000007", own, "latest"])
    weight = parts["model"].weight.detach().clone()
    torch.nn.init.zeros_(parts["model"].weight)
    checkpoint.load_sharded(tmp_path, **parts)
    assert torch.equal(parts["model"].weight, weight)


@pytest.mark.parametrize("generation", [None, 3, "../precious", "precious", "1"])
def test_a_latest_that_is_no_sharded_checkpoints(tmp_path: Path, generation: Any) -> None:
    (tmp_path / "precious").mkdir()
    checkpoint.save(tmp_path / "latest", model=nn.Linear(2, 2), generation=generation, amp=None, files={})
    before = (tmp_path / "latest").read_bytes()
    for call in (checkpoint.save_sharded, checkpoint.load_sharded):
        with pytest.raises(CheckpointError, match=r"was not written by preamp\.checkpoint\.save_sharded"):
            call(tmp_path, **_parts())
    assert (tmp_path / "latest").read_bytes() == before and sorted(os.listdir(tmp_path)) == ["latest", "precious"]


def test_a_killed_save_is_cleared_away(tmp_path: Path) -> None:
    parts = _parts()
    checkpoint.save_sharded(tmp_path, **parts)
    begun = tmp_path / "preamp-00000002"
    begun.mkdir()
    (begun / "half").write_text("")
    checkpoint.save_sharded(tmp_path, **parts)
    assert sorted(os.listdir(tmp_path)) == ["latest", begun.name] and not (begun / "half").exists()
