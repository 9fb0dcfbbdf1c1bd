"""Packages that are missing, and a cache that survives damage."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from preamp.errors import MissingExtra
from preamp.zoo._sources import cache_folder, cached, package_file, require


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PREAMP_CACHE", str(tmp_path / "deep" / "cache"))
    return cache_folder()


class Builder:
    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return {"numbers": torch.arange(1000), "count": 3, "text": "words"}


def test_what_was_built_is_kept(folder):
    build = Builder()
    first, second = cached("thing", build), cached("thing", build)
    assert build.calls == 1
    assert torch.equal(first["numbers"], second["numbers"])
    assert (second["count"], second["text"]) == (3, "words")


def truncate(blob):
    return blob[: len(blob) // 2]


@pytest.mark.parametrize("damage", [truncate, lambda blob: b"", lambda blob: b"short"])
def test_a_damaged_file_is_built_anew(folder, damage):
    build = Builder()
    cached("thing", build)
    path = folder / "thing.pt"
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert torch.equal(cached("thing", build)["numbers"], torch.arange(1000))
    assert build.calls == 2
    cached("thing", build)
    assert build.calls == 2


def test_many_writers_leave_one_whole_file(folder):
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: cached("thing", Builder())["numbers"].sum().item(), range(32)))
    assert set(results) == {499500}
    assert [path.name for path in folder.iterdir()] == ["thing.pt"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PREAMP_CACHE", str(tmp_path / "file"))
    build = Builder()
    assert cached("thing", build)["count"] == cached("thing", build)["count"] == 3
    assert build.calls == 2


def test_a_build_that_fails_leaves_nothing(folder):
    with pytest.raises(ZeroDivisionError):
        cached("thing", lambda: {"x": 1 // 0})
    assert not folder.exists()


def test_a_missing_package_names_the_extra():
    with pytest.raises(MissingExtra, match=r"the test.*preamp\[demo\]"):
        package_file("no_such_package", "data.csv", package="no-such-package", why="the test")
    with pytest.raises(MissingExtra, match="no-such-package"):
        require("no_such_package.part", "no-such-package", "the test")


def test_a_package_without_the_file_counts_as_missing():
    with pytest.raises(MissingExtra):
        package_file("torch", "no/such/file.csv", package="torch", why="the test")
