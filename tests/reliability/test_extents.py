"""Files that state more than they hold: refused before anybody makes room for it."""

from __future__ import annotations

import pickle
import resource
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from preamp import checkpoint
from preamp.checkpoint._file import FORMAT
from preamp.errors import CheckpointError

from .runs import sealed

ROOM = 3 << 30


@pytest.fixture(autouse=True)
def little_room() -> Iterator[None]:
    """Whoever asks for gigabytes gets a MemoryError, not the machine's memory."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def saved(path: Path, **content: Any) -> Path:
    torch.save({"format": FORMAT, "model": {}, **content}, path)
    return sealed(path)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1).expand(3 * 10**9),
        torch.zeros(1).expand(10**12),
        torch.zeros(8, 1).expand(8, 10**9),
        torch.zeros(2).as_strided((10**5, 10**5), (0, 0)),
        torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1).expand(1, 10**10), (3, 10**10)),
    ],
    ids=["expanded", "more than there is", "a column", "strided", "sparse"],
)
def test_tensors_that_show_more_than_they_hold(tmp_path: Path, tensor: torch.Tensor) -> None:
    path = saved(tmp_path / "small.pt", x=[{"deep": tensor}])
    assert path.stat().st_size < 10_000
    with pytest.raises(CheckpointError):
        checkpoint.load(path)


class Made:
    """What a file may ask torch to make, by a call that it takes for harmless."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return self.kind, (10**8,)


@pytest.mark.parametrize("kind", [bytearray, torch.Tensor])
def test_things_made_at_loading(tmp_path: Path, kind: Any) -> None:
    path = saved(tmp_path / "small.pt", x=[Made(kind)])
    with pytest.raises(CheckpointError):
        checkpoint.load(path)


def test_they_are_not_saved_either(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"extra.*contiguous"):
        checkpoint.save(tmp_path / "own.pt", model=nn.Linear(2, 2), extra=torch.zeros(1).expand(10**10))
    assert not list(tmp_path.iterdir())


def test_expanded_and_overlapping_tensors_of_ordinary_size_go_both_ways(tmp_path: Path) -> None:
    values = torch.arange(6.0)
    extra = {"a": values[:1].expand(1000), "b": values.unfold(0, 3, 1), "c": values[2:], "d": values.view(2, 3).t()}
    checkpoint.save(tmp_path / "own.pt", model=nn.Linear(2, 2), extra=extra)
    back = checkpoint.load(tmp_path / "own.pt")["extra"]
    assert all(torch.equal(back[name], value) for name, value in extra.items())


def test_packed_archives(tmp_path: Path) -> None:
    """A few kilobytes that unpack to gigabytes."""
    path, bomb = saved(tmp_path / "a.pt", x=torch.zeros(4)), tmp_path / "bomb.pt"
    assert checkpoint.load(path)["x"].shape == (4,)
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in whole.namelist():
            packed.writestr(name, b"\0" * (1 << 26) if name.endswith("data/0") else whole.read(name))
    with pytest.raises(CheckpointError, match="larger than the whole"):
        checkpoint.load(sealed(bomb))


def test_memory_that_is_stated_and_not_there(tmp_path: Path) -> None:
    """The table of contents says how many numbers a part has; nobody compares that with the part."""
    path, lie = saved(tmp_path / "a.pt", x=torch.zeros(100_003)), tmp_path / "lie.pt"
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(lie, "w") as made:
        for name in whole.namelist():
            part = whole.read(name)
            if name.endswith("data.pkl"):
                part = part.replace(struct.pack("<i", 100_003), struct.pack("<i", 900_000_003))
            made.writestr(name, part[:4] if name.endswith("data/0") else part)
    with pytest.raises(CheckpointError):
        checkpoint.load(sealed(lie))


def test_archives_of_another_kind(tmp_path: Path) -> None:
    """torch's old kind of file says how large its tensors are before they come."""
    path = tmp_path / "old.pt"
    torch.save({"format": FORMAT, "x": torch.zeros(4)}, path, _use_new_zipfile_serialization=False)
    with open(path, "ab") as file:
        file.write(b"PK\x05\x06" + b"\0" * 18)
    with pytest.raises(CheckpointError, match="no archive"):
        checkpoint.load(sealed(path))
    path.write_bytes(pickle.dumps({"a": 1}) + b"PK\x05\x06" + b"\0" * 18)
    with pytest.raises(CheckpointError, match="no archive"):
        checkpoint.load(sealed(path))
