"""Saves in the background: the states of the moment, in order, never half, and no failure is silent."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from preamp.checkpoint import _save
from preamp.errors import PreampWarning

from .runs import LEVELS, OPTIMIZERS, Run, alike

save, save_async, load = preamp.checkpoint.save, preamp.checkpoint.save_async, preamp.checkpoint.load


class Gate:
    """Holds the writing thread until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.written = threading.Event(), []
        write = _save.write

        def held(path: Any, content: Any) -> None:
            assert self.open.wait(30)
            self.written.append((Path(path).name, content.get("number")))
            write(path, content)

        monkeypatch.setattr(_save, "write", held)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_training_goes_on_and_the_file_has_the_moment(
    level: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step after the call changes weights, masters, moments and scale in place; the file does not notice."""
    gate = Gate(monkeypatch)
    run, at = Run(level, kind), tmp_path / "c.pt"
    run.steps(0, 1, 2)
    log = {"losses": [0.5]}
    moment = run.state()
    pending = save_async(at, **run.objects, log=log)
    log["losses"].append(0.4)
    run.step(3, factor=float("inf"))
    run.steps(4, 5)
    end = run.state()
    assert not pending.done() and not at.exists()
    gate.open.set()
    pending.result(30)
    content = load(at, **run.objects)
    assert alike(run.state(), moment) and content["log"] == {"losses": [0.5]}
    run.step(3, factor=float("inf"))
    run.steps(4, 5)
    assert alike(run.state(), end)


def test_one_save_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one copy of the states is held, and a later save is never replaced by an earlier one."""
    gate, model, path = Gate(monkeypatch), nn.Linear(2, 2), tmp_path / "c.pt"
    first = save_async(path, model=model, number=1)
    reached: list[str] = []

    def others() -> None:
        save_async(path, model=model, number=2)
        reached.append("second")
        save(path, model=model, number=3)
        reached.append("third")

    thread = threading.Thread(target=others)
    thread.start()
    thread.join(0.05)
    assert not reached and not first.done()
    gate.open.set()
    thread.join()
    assert reached == ["second", "third"]
    assert gate.written == [("c.pt", number) for number in (1, 2, 3)]
    assert load(path)["number"] == 3


def test_loading_waits_for_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, path = Gate(monkeypatch), tmp_path / "c.pt"
    save_async(path, model=nn.Linear(2, 2), number=1)
    threading.Timer(0.05, gate.open.set).start()
    assert load(os.path.relpath(path))["number"] == 1


def test_a_tied_weight_is_copied_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(300, 300, bias=False), nn.Linear(300, 300, bias=False))
    model[1].weight = model[0].weight
    save_async(tmp_path / "later.pt", model=model).result()
    save(tmp_path / "now.pt", model=model)
    later, now = ((tmp_path / name).stat().st_size for name in ("later.pt", "now.pt"))
    assert max(later, now) < 1.5 * 300 * 300 * 4
    fresh = nn.Sequential(nn.Linear(300, 300, bias=False), nn.Linear(300, 300, bias=False))
    load(tmp_path / "later.pt", model=fresh)
    assert torch.equal(fresh[0].weight, fresh[1].weight)


def test_a_failure_is_told_when_it_happens_and_raised_when_asked_for(tmp_path: Path) -> None:
    with pytest.warns(PreampWarning, match=r"not saved: .*nowhere.*FileNotFoundError"):
        pending = save_async(tmp_path / "nowhere" / "c.pt", model=nn.Linear(2, 2))
        save_async(tmp_path / "c.pt", model=nn.Linear(2, 2), number=2).result(30)  # it does not stand in the way
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            pending.result()
    assert load(tmp_path / "c.pt")["number"] == 2


EXIT = """
    import sys, time
    from torch import nn
    import preamp
    from preamp.checkpoint import _save
    write = _save.write
    def slowly(path, content):
        time.sleep(0.3)
        write(path, content)
    _save.write = slowly
    how, good, bad = sys.argv[1:]
    preamp.checkpoint.save_async(good, model=nn.Linear(3, 3), number=1)
    preamp.checkpoint.save_async(bad, model=nn.Linear(3, 3))
    if how == "raises":
        raise ZeroDivisionError
    if how == "sys.exit":
        sys.exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["returns", "raises", "sys.exit"])
def test_the_interpreter_waits_and_tells(how: str, tmp_path: Path) -> None:
    good, bad = tmp_path / "c.pt", tmp_path / "nowhere" / "c.pt"
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(EXIT), how, str(good), str(bad)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == (1 if how == "raises" else 0)
    assert load(good)["number"] == 1
    assert "PreampWarning: a checkpoint was not saved" in ran.stderr and "nowhere" in ran.stderr


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_saves_on_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread stays with the parent; a child that waited for it would hang."""
    script = """
        import os, sys
        from torch import nn
        import preamp
        pending = preamp.checkpoint.save_async(sys.argv[1], model=nn.Linear(300, 300))
        child = os.fork()
        if child == 0:
            preamp.checkpoint.save_async(sys.argv[2], model=nn.Linear(3, 3)).result()
            os._exit(7)
        pending.result()
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    names = [str(tmp_path / name) for name in ("parent.pt", "child.pt")]
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(script), *names], capture_output=True, timeout=60)
    assert ran.returncode == 7, ran.stderr
    assert all(load(name) for name in names)
