"""`./dev` sets `.venv` up by verb: what a verb needs and no more, and after a kill, what is missing."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Killed(BaseException):
    """As by SIGKILL: nothing may catch it."""


class Machine:
    """Runs no command; does on disk what venv and pip do, and may be ended within any of the commands."""

    def __init__(self, venv: Path) -> None:
        self.venv = venv
        self.ran: list[str] = []
        self.ends: dict[int, BaseException] = {}  # by the number of the command

    def __call__(self, *command: str | Path, **_: Any) -> int:
        words = [str(each) for each in command]
        self.ran.append(" ".join(words).replace(f"{self.venv}", ".venv").replace(sys.executable, "python3"))
        end = self.ends.pop(len(self.ran), None)
        if words[1:3] == ["-m", "venv"]:
            self._venv(Path(words[-1]), "--clear" in words, end)
        elif words[1:3] == ["-m", "pip"]:
            self._pip(Path(words[0]).parents[1], words, end)
        elif end:
            raise end
        return 0

    def _venv(self, folder: Path, clear: bool, end: BaseException | None) -> None:
        if clear:
            shutil.rmtree(folder, ignore_errors=True)
        site = folder / "lib" / "python3.11" / "site-packages"
        site.mkdir(parents=True, exist_ok=True)
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / "python").touch()
        if end:
            raise end
        for name in ("pip", "activate"):
            (folder / "bin" / name).touch()
        (site / "pip-0.dist-info").mkdir(exist_ok=True)
        (site / "pip-0.dist-info" / "INSTALLER").touch()

    def _pip(self, folder: Path, words: list[str], end: BaseException | None) -> None:
        site = next((folder / "lib").glob("*/site-packages"))
        if "--upgrade" in words:
            shutil.rmtree(site / "pip-0.dist-info")
        for name in words[-1].strip(".[]").split(","):
            about = site / f"{name}-1.dist-info"
            if about.exists():
                assert (about / "INSTALLER").exists(), "a package that is half there counts as installed"
                continue
            about.mkdir()
            if end:
                raise end
            (about / "INSTALLER").touch()

    def pips(self) -> list[str]:
        """What pip was asked for, in which environment; forgets it."""
        asked = [line.split(" -m pip install --quiet --disable-pip-version-check --no-compile ") for line in self.ran]
        self.ran.clear()
        return [f"{line[0].removesuffix('/bin/python')}: {line[1]}" for line in asked if len(line) == 2]


def dev_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`./dev`, imported."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = importlib.machinery.SourceFileLoader("dev", str(ROOT / "dev"))
    spec = importlib.util.spec_from_loader("dev", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"):  # which `test` changes: they come back
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("PREAMP_PYTHON", raising=False)
    module = dev_module(monkeypatch)
    module.ROOT, module.VENV = tmp_path, tmp_path / ".venv"
    module.run = Machine(module.VENV)
    # what only tests load, made small
    module.beside = lambda: {"timm": ("-c", "constraints.txt", "timm"), "triton-3.6": ("triton==3.6.0",)}
    return module


CONSTRAINED = ".venv: -c constraints.txt"
APART = [".venv/timm: -c constraints.txt timm", ".venv/triton-3.6: triton==3.6.0"]
STAMPS = {"ruff", "cli", "demo", "migrate", "docs", "dev", "frameworks", "timm", "triton-3.6"}


def stamps(dev: ModuleType) -> set[str]:
    return {path.name.removeprefix("preamp-setup-") for path in dev.VENV.glob("preamp-setup-*")}


def test_a_verb_installs_what_it_needs_and_test_the_rest(dev: ModuleType) -> None:
    dev.demo("--quick")
    assert dev.run.ran[0] == "python3 -m venv --clear .venv"
    assert dev.run.ran[3:] == [".venv/bin/python -m preamp demo --quick"]
    assert dev.run.pips() == [f"{CONSTRAINED} --upgrade pip", f"{CONSTRAINED} -e .[cli,demo]"]
    dev.bench()
    assert dev.run.ran == [".venv/bin/python -m benchmarks"]
    dev.run.ran.clear()
    with pytest.raises(SystemExit, match=r"^0$"):
        dev.test()
    assert dev.run.ran[0].startswith(".venv/bin/python -m pip install ")  # into the same environment
    assert dev.run.ran[-1].startswith(".venv/bin/python -m pytest ")
    assert dev.run.pips() == [f"{CONSTRAINED} ruff -e .[migrate,docs,dev]", f"{CONSTRAINED} -e .[frameworks]"]
    assert stamps(dev) == STAMPS - {"timm", "triton-3.6"}
    dev.run.ran.clear()
    with pytest.raises(SystemExit, match=r"^0$"):
        dev.test("--all")
    assert dev.run.pips() == APART
    assert stamps(dev) == STAMPS
    for verb in dev.VERBS.keys() - {"gpu", "against", "test"}:
        dev.VERBS[verb]()
    assert dev.run.pips() == []


def test_tests_run_in_two_parts(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    dev.setup()

    def ran(statuses: tuple[int, ...], *arguments: str) -> tuple[int, list[str]]:
        done, left = [], iter(statuses)

        def run(*command: str, check: bool = True, **_: Any) -> int:
            if command[2] != "pytest":
                return 0
            done.append(" ".join(command[3:]).partition(" -m not slow")[2].strip())
            return next(left)

        monkeypatch.setattr(dev, "run", run)
        with pytest.raises(SystemExit) as end:
            dev.test(*arguments)
        return end.value.code, done

    whole = "tests/distributed tests/house tests/integrations tests/sick"
    units = " ".join(f"--ignore={folder}" for folder in whole.split())
    assert ran((0, 0)) == (0, [units, whole])
    assert ran((0,), "unit") == (0, [units])
    assert ran((1, 0)) == (1, [units, whole]), "what fails first does not hide the rest"
    assert ran((5, 0), "-k", "frameworks") == (0, [f"-k frameworks {units}", f"-k frameworks {whole}"])
    assert ran((5, 5), "-k", "nothing")[0] == 5
    assert ran((5, 2))[0] == 2


@pytest.mark.parametrize("end", [Killed(), SystemExit(3), KeyboardInterrupt()], ids=["killed", "failed", "Ctrl-C"])
def test_a_set_up_that_was_ended_goes_on(
    dev: ModuleType, end: BaseException, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dev.setup()
    whole, commands = stamps(dev), len(dev.run.ran)
    assert commands == 7  # .venv, pip itself, pip; two environments on top, a pip each
    for number in range(1, commands + 1):
        monkeypatch.setattr(dev, "VENV", dev.ROOT / f"{number}")
        dev.run = Machine(dev.VENV)
        dev.run.ends = {number: end}
        with pytest.raises(BaseException) as raised:
            dev.setup()
        assert getattr(raised.value, "code", None) == {SystemExit: 3, KeyboardInterrupt: 130}.get(type(end))
        told = capsys.readouterr().err
        assert told == (
            "" if isinstance(end, Killed) else "the set-up stopped; ./dev setup goes on with what is missing\n"
        )
        done = stamps(dev)
        assert done < whole
        dev.run.ran.clear()
        dev.setup()
        assert stamps(dev) == whole, number
        again = dev.run.pips()
        assert not [line for part in done for line in again if f"/{part}:" in line], "what is there stays as it is"
        assert ("ruff" in done) != any(line.startswith(CONSTRAINED) for line in again)


def test_an_old_python_is_told_what_to_do(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9))
    with pytest.raises(SystemExit, match=r"preamp needs Python 3\.10 or newer .* try python3\.11 \./dev"):
        dev.demo()
    assert dev.run.ran == []


def test_parts_are_there_and_torch_is_pinned(dev: ModuleType) -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(dev.EXTRAS) <= project["optional-dependencies"].keys()
    assert {part for parts in dev.PARTS.values() for part in parts} <= {"ruff", *dev.EXTRAS}
    assert dev.PARTS.keys() <= dev.VERBS.keys()
    assert re.search(r"^torch==[\d.]+$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
