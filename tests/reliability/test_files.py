"""Files that are damaged, foreign, malicious or cannot be written: an error each, nothing executed, nothing lost."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import preamp
from preamp.checkpoint._file import FORMAT
from preamp.errors import CheckpointError, PreampError
from preamp.tree import tensors

from .. import forks
from .runs import LEVELS, OPTIMIZERS, Run, alike, sealed, seeded

save, load = preamp.checkpoint.save, preamp.checkpoint.load


@pytest.fixture
def run() -> Run:
    made = Run("O2")
    made.steps(0, 1, 2)
    return made


def test_alike_sees_a_bit() -> None:
    run = Run()
    before = run.state()
    assert alike(before, run.state()) and list(tensors(before))
    before["session"]["masters"]["0.weight"].view(torch.int32)[0, 0] ^= 1
    assert not alike(before, run.state())


def refused(path: Path, run: Run, before: Any) -> None:
    with pytest.raises(CheckpointError, match=path.name):
        load(path, **run.objects)
    assert alike(run.state(), before)


@pytest.mark.slow
def test_truncated_at_any_byte(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    save(path, **run.objects, epoch=3)
    whole, before = path.read_bytes(), run.state()
    for length in reversed(range(len(whole))):
        os.truncate(path, length)
        with pytest.raises(CheckpointError):
            load(path, **run.objects)
    assert alike(run.state(), before)


def test_a_bit_flipped_in_any_byte(run: Run, tmp_path: Path) -> None:
    """Tensors, numbers, names, zip headers, time stamps, padding, the seal itself."""
    path = tmp_path / "c.pt"
    save(path, **run.objects, epoch=3)
    whole, before, chance = path.read_bytes(), run.state(), seeded("flips")
    with open(path, "rb+", buffering=0) as file:
        for place, byte in enumerate(whole):
            file.seek(place)
            file.write(bytes([byte ^ (1 << chance.randrange(8))]))
            with pytest.raises(CheckpointError):
                load(path, **run.objects)
            file.seek(place)
            file.write(bytes([byte]))
    assert alike(run.state(), before)
    assert load(path, **run.objects)["epoch"] == 3


def test_appended_or_swapped_bytes(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    save(path, **run.objects)
    whole, before = path.read_bytes(), run.state()
    for content in (whole + b"\0", whole + whole, whole[1:], whole[: len(whole) // 2] * 2, bytes(len(whole))):
        path.write_bytes(content)
        refused(path, run, before)


def test_content_changed_and_saved_again_without_preamp(run: Run, tmp_path: Path) -> None:
    """It reads as before, but nothing proves it any more."""
    path = tmp_path / "c.pt"
    save(path, **run.objects, epoch=3)
    content: Any = torch.load(path, weights_only=True)
    assert content["epoch"] == 3
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="does not end with the seal"):
        load(path, **run.objects)


class Touch:
    """What a malicious file holds: unpickling it runs a function."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize(
    "kind", ["evil", "sealed", "in a checkpoint", "pickle", "a model", "tensor", "text", "empty", "folder", "numpy zip"]
)
def test_foreign_and_malicious_files(run: Run, tmp_path: Path, kind: str) -> None:
    path, executed = tmp_path / "c.pt", tmp_path / "executed"
    before = run.state()
    {
        "evil": lambda: torch.save(Touch(executed), path),
        "sealed": lambda: torch.save(Touch(executed), path) or sealed(path),
        "in a checkpoint": lambda: torch.save({"model": Touch(executed), "format": FORMAT}, path) or sealed(path),
        "pickle": lambda: path.write_bytes(pickle.dumps(Touch(executed))),
        "a model": lambda: torch.save(nn.Linear(2, 2), path) or sealed(path),
        "tensor": lambda: torch.save(torch.ones(3), path) or sealed(path),
        "text": lambda: path.write_text("epoch 3, loss 0.2\n" * 30),
        "empty": lambda: path.write_bytes(b""),
        "folder": path.mkdir,
        "numpy zip": lambda: numpy.savez(path.with_suffix(""), a=1) or sealed(path.with_suffix(".npz").rename(path)),
    }[kind]()
    refused(path, run, before)
    assert not executed.exists()


def test_nothing_at_the_path_is_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nowhere.pt")


def test_what_could_not_be_loaded_is_not_saved(run: Run, tmp_path: Path) -> None:
    """It would be found out on the day the file is needed."""
    path = tmp_path / "c.pt"
    save(path, **run.objects)
    whole = path.read_bytes()
    for extra, place in ((run, "best"), ({"a": [1, Path("x")]}, r"best\['a'\]\[1\]"), (numpy.float64(1), "best")):
        for function in (save, preamp.checkpoint.save_async):
            with pytest.raises(CheckpointError, match=f"{place} is a .*, which load"):
                function(path, **run.objects, best=extra if extra is not run else object())
    for name in ("format", "amp"):
        with pytest.raises(CheckpointError, match="use themselves"):
            save(path, **run.objects, **{name: 1})
    assert path.read_bytes() == whole and os.listdir(tmp_path) == ["c.pt"]


CASES = [
    (level, kind, wrong, told)
    for level in LEVELS
    for kind in OPTIMIZERS
    for wrong in ("optimizer", "optimizer entries", "model", "session", "scale")
    for told in (True, False)
    if (told or wrong not in ("session", "scale")) and (wrong != "scale" or level in ("O1", "O2"))
]


@pytest.mark.parametrize(("level", "kind", "wrong", "told"), CASES)
def test_loading_is_all_or_nothing(level: str, kind: str, wrong: str, told: bool, tmp_path: Path) -> None:
    """A state that does not fit leaves all as they were, to the bit, whether or not load() is told of the session."""
    run, twin, other = Run(level, kind), Run(level, kind), Run(level, kind, seed=5)
    for each in (run, twin):
        each.steps(0, 1, 2)
    other.steps(7, 8)
    content = {name: thing.state_dict() for name, thing in other.objects.items()}
    if wrong == "model":
        content["model"] = {**content["model"], "3.weight": torch.zeros(2, 2)}
    elif wrong == "optimizer":
        content["optimizer"] = {"state": {}, "param_groups": [*content["optimizer"]["param_groups"]] * 2}
    elif wrong == "optimizer entries":
        content["optimizer"] = {"state": 5, "param_groups": content["optimizer"]["param_groups"]}
    elif wrong == "session":
        content["session"] = {**content["session"], "policy": "O0"}
    else:
        losses = {"loss": {**content["session"]["losses"]["loss"], "scale": -1.0}}
        content["session"] = {**content["session"], "losses": losses}
    path = tmp_path / "c.pt"

    class Told:
        def __init__(self, state: Any) -> None:
            self.state_dict = lambda: state

    save(path, **{name.replace("session", "amp"): Told(state) for name, state in content.items()})
    objects = run.objects if told else {name: run.objects[name] for name in ("model", "optimizer")}
    with pytest.raises(PreampError):
        load(path, **objects)
    assert {p.dtype for p in run.model.parameters()} == {p.dtype for p in twin.model.parameters()}
    assert alike(run.state(), twin.state())
    for each in (run, twin):
        each.steps(3, 4)
    assert alike(run.state(), twin.state())


class Refusing:
    """An object of a user's own whose state fits nobody."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"kept": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded.append(state)
        if state["kept"] != 1:
            raise ValueError("not mine")


def test_further_objects_are_loaded_with_the_others(tmp_path: Path) -> None:
    def schedule_of(rate: float) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), rate)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    model, optimizer, schedule = schedule_of(0.5)
    for _ in range(3):
        optimizer.step()
        schedule.step()
    save(tmp_path / "c.pt", model=model, optimizer=optimizer, schedule=schedule, own={"kept": 2}, step=3)
    other, second, follower = schedule_of(0.1)
    before = other.weight.clone()
    own = Refusing()
    with pytest.raises(CheckpointError, match=r"does not fit the own .* nothing was loaded: not mine"):
        load(tmp_path / "c.pt", model=other, optimizer=second, schedule=follower, own=own)
    assert torch.equal(other.weight, before) and follower.last_epoch == 0
    assert own.loaded == [{"kept": 2}, {"kept": 1}]
    with pytest.raises(CheckpointError, match=r"step= is an object .* got an int: .* load\(path\)\['step'\]"):
        load(tmp_path / "c.pt", model=other, step=0)
    with pytest.raises(CheckpointError, match=r"has no 'scheduler'; it has .*schedule"):
        load(tmp_path / "c.pt", model=other, scheduler=follower)
    assert load(tmp_path / "c.pt", model=other, optimizer=second, schedule=follower, own=None)["step"] == 3
    assert torch.equal(other.weight, model.weight) and follower.state_dict() == schedule.state_dict()


def test_several_objects_are_all_or_nothing_and_named(tmp_path: Path) -> None:
    models = {name: nn.Linear(2, 2) for name in "ab"}
    path = tmp_path / "c.pt"
    save(path, model=models)
    for wrong in ({"a": models["a"], "c": models["b"]}, models["a"]):
        with pytest.raises(CheckpointError, match=r"has no 'model(:c)?'; it has model:a, model:b"):
            load(path, model=wrong)
    fresh = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 3)}
    before = {name: {k: v.clone() for k, v in model.state_dict().items()} for name, model in fresh.items()}
    with pytest.raises(CheckpointError, match="model:b"):
        load(path, model=fresh)
    assert all(alike(dict(model.state_dict()), before[name]) for name, model in fresh.items())
    fresh["b"] = nn.Linear(2, 2)
    load(path, model=fresh)
    assert all(torch.equal(fresh[name].weight, models[name].weight) for name in models)


FULL = """
    import os, resource, signal, sys
    from pathlib import Path
    import torch
    from torch import nn
    import preamp
    folder = Path(sys.argv[1])
    path = folder / "c.pt"
    small, large = nn.Linear(4, 4), nn.Linear(200, 200)
    preamp.checkpoint.save(path, model=small)
    before = {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    def told(function, *args):
        try:
            function(*args)
        except (OSError, preamp.PreampError) as error:
            print(type(error).__name__, getattr(error, "errno", None), error)
        else:
            print("no error")
        assert {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))} == before
    told(lambda: preamp.checkpoint.save(path, model=large))
    told(lambda: preamp.checkpoint.save_async(path, model=large).result())
    told(lambda: preamp.checkpoint.save(folder / "nowhere" / "c.pt", model=small))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    preamp.checkpoint.save(path, model=large)
    preamp.checkpoint.load(path, model=large)
    assert os.listdir(folder) == ["c.pt"]
"""


@pytest.mark.skipif(os.name != "posix", reason="limits of file size are POSIX's")
def test_no_room_on_the_disk(tmp_path: Path) -> None:
    """The system refuses bytes in the middle of a file: the old one stays, nothing else does, the error says why."""
    script, folder = tmp_path / "full.py", tmp_path / "files"
    script.write_text(textwrap.dedent(FULL))
    folder.mkdir()
    ran = forks.run([str(script), str(folder)])
    assert ran.returncode == 0, ran.stderr
    saved, later, nowhere = ran.stdout.splitlines()
    for line in (saved, later):
        assert line.startswith("OSError 27 ") and "File too large" in line and "c.pt" in line, line
    assert nowhere.startswith("FileNotFoundError 2 ") and "nowhere" in nowhere


def test_what_killed_processes_left_is_cleared_away(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    host = preamp.checkpoint._file._HOST
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    keep = [f".c.pt.{host}-{os.getppid()}-00000000.tmp", f".c.pt.other{host}-{gone.pid}-00000000.tmp", ".c.pt.tmp"]
    drop = [f".c.pt.{host}-{gone.pid}-00000000.tmp", f".c.pt.{host}-{os.getpid()}-00000000.tmp"]
    for name in (*keep, *drop):
        (tmp_path / name).write_bytes(b"half")
    save(path, **run.objects)
    assert sorted(os.listdir(tmp_path)) == sorted([*keep, "c.pt"])
