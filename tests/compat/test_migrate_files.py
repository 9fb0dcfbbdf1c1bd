"""`preamp migrate` on files and folders: what is read, printed, written, and told by the exit status."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from preamp.errors import MissingExtra
from preamp.migrate import CannotParse, NoSuchFile, migrate_source, run

from .migrations import SCRIPT

pytest.importorskip("libcst")


def test_without_apex() -> None:
    text = "import torch  # not apex\nfrom torch.cuda import amp\nwith amp.autocast():\n    pass\n"
    found = migrate_source(text, "s.py")
    assert found.after == text and not found.uses_apex and not found.notes
    assert not migrate_source("", "s.py").changed


def test_what_does_not_parse_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(CannotParse, match=r"^s\.py:2: not Python"):
        migrate_source("from apex import amp\nprint 'x'\n", "s.py")
    file = tmp_path / "s.py"
    file.write_bytes(b"# coding: utf-8\nfrom apex import amp  # \xe9\n")
    text, status = run([file])
    assert status == 2 and text.startswith("error: ") and "UTF-8" in text
    with pytest.raises(NoSuchFile, match=r"nothing\.py"):
        run([tmp_path / "nothing.py"])


def test_folders_and_status(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SCRIPT, encoding="utf-8")
    for name, text in (("sub/b.py", "print('plain')\n"), (".venv/c.py", SCRIPT)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text, encoding="utf-8")
    text, status = run([tmp_path])
    assert status == 0 and text.count("+++ b/") == 1 and "1 file uses nothing of Apex" in text
    assert (tmp_path / "a.py").read_text(encoding="utf-8") == SCRIPT
    text, status = run([tmp_path / "sub" / "b.py"])
    assert status == 0 and "uses nothing of Apex" in text
    (tmp_path / "d.py").write_text("from apex.parallel import LARC\nopt = LARC(opt)\n", encoding="utf-8")
    text, status = run([tmp_path])
    assert status == 1 and f"{tmp_path}/d.py:2: by hand: apex.parallel.LARC: " in text


def test_a_file_that_is_left_says_so(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(SCRIPT + "log(model.w.grad)\n", encoding="utf-8")
    for write in (False, True):
        text, status = run([file], write=write)
        assert status == 1 and text.startswith(f"{file}: left as it is\n{file}:8: by hand: model.w.grad is read")
    assert file.read_text(encoding="utf-8") == SCRIPT + "log(model.w.grad)\n"


def test_the_difference_is_a_patch(tmp_path: Path) -> None:
    if shutil.which("patch") is None:
        pytest.skip("there is no patch here")
    found = migrate_source(SCRIPT.rstrip("\n"), "a.py")
    (tmp_path / "a.py").write_text(SCRIPT.rstrip("\n"), encoding="utf-8")
    done = subprocess.run(["patch", "-p1"], input=found.diff(), text=True, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "a.py").read_text(encoding="utf-8") == found.after


def test_written_files_keep_encoding_line_ends_and_mode(tmp_path: Path) -> None:
    text = "# -*- coding: latin-1 -*-\n# caf\xe9\n" + SCRIPT + "from apex.parallel import LARC\nopt = LARC(opt)\n"
    file = tmp_path / "a.py"
    file.write_bytes(text.replace("\n", "\r\n").encode("latin-1"))
    file.chmod(0o750)
    link = tmp_path / "link.py"
    link.symlink_to(file)
    said, status = run([link], write=True)
    data = file.read_bytes().decode("latin-1")
    assert status == 1 and "rewritten" in said and link.is_symlink()
    assert data.count("\r\n") == data.count("\n") and "caf\xe9" in data and "session.backward(loss)\r\n" in data
    assert file.stat().st_mode & 0o777 == 0o750
    line = int(said.splitlines()[1].partition("link.py:")[2].partition(":")[0])
    assert data.splitlines()[line - 1] == "opt = LARC(opt)"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.py", "link.py"]
    run([link], write=True)
    assert file.read_bytes().decode("latin-1") == data


def test_without_libcst(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libcst", None)
    with pytest.raises(MissingExtra, match=r"preamp\[migrate\]"):
        migrate_source(SCRIPT, "s.py")
