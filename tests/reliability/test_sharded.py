"""Sharded checkpoints on one process: states that are not there yet, damage, and files that want to run code."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import preamp
from preamp.checkpoint import load_sharded, save_sharded
from preamp.checkpoint._file import read, sha256_of, write
from preamp.checkpoint._sharded import LATEST
from preamp.errors import CheckpointError

from ..combined.training import differences
from ..session.toys import squares

MAKERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "AdamW": lambda p: preamp.optim.AdamW([{"params": p[:3]}, {"params": p[3:], "lr": 3e-3}], 1e-2, eps=1e-4),
    "AdamW in 8 bits": lambda p: preamp.optim.AdamW(p, 1e-2, eps=1e-4, states="8bit"),
    "SGD": lambda p: preamp.optim.SGD(p, 1e-2, momentum=0.9, dampening=0.5),
    "LAMB": lambda p: preamp.optim.LAMB(p, 1e-2, eps=1e-4),
    "NovoGrad": lambda p: preamp.optim.NovoGrad(p, 1e-2, eps=1e-4),
    "Adagrad": lambda p: preamp.optim.Adagrad(p, 1e-2, eps=1e-4),
    "torch AdamW": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-4),
    "torch SGD": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, dampening=0.5),
    "torch SGD, no states": lambda p: torch.optim.SGD(p, 1e-2),
    "torch Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, eps=1e-4),
    "torch Rprop": lambda p: torch.optim.Rprop(p, 1e-3),
}


class Net(nn.Module):
    """A part that is always there, one that is used late, one that never learns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.late = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor, late: bool) -> Tensor:
        x = self.frozen(self.second(self.first(x)))
        return self.late(x) if late else x


class Run:
    def __init__(self, level: str, maker: str) -> None:
        self.model = Net()
        self.optimizer = MAKERS[maker](list(self.model.parameters()))
        self.session = preamp.prepare(self.model, self.optimizer, level=level)

    def backward(self, step: int, late: bool = False) -> None:
        torch.manual_seed(step)
        squares(self.session, self.model, torch.randn(8, 4), late)

    def train(self, begin: int, end: int, late: bool = False) -> None:
        for step in range(begin, end):
            self.backward(step, late)
            self.session.step()
            self.session.zero_grad()

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "session": self.session}

    def everything(self) -> list[Any]:
        """What a checkpoint could change, and what reading one could."""
        with self.session.full_precision(values_only=True):
            weights = [p.detach().clone() for p in self.model.parameters()]
        states = [
            {n: v.clone() if isinstance(v, Tensor) else v for n, v in self.optimizer.state.get(p, {}).items()}
            for p in self.model.parameters()
        ]
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        flags = [(p.requires_grad, p.grad is None, p.dtype) for p in self.model.parameters()]
        return [weights, states, groups, flags, self.session.steps]


def alike(one: Any, other: Any) -> bool:
    return differences(one, other) == []


QUICK = {(level, maker) for level in ("O2", "O3", "O5") for maker in ("AdamW", "LAMB", "torch AdamW")}
SLOW = {(level, maker) for level in ("O0", "O4", "O5") for maker in MAKERS} - QUICK


@pytest.mark.parametrize(
    ("level", "maker"), [*sorted(QUICK), *(pytest.param(*case, marks=pytest.mark.slow) for case in sorted(SLOW))]
)
@pytest.mark.parametrize("steps", [0, 2])
def test_states_that_are_not_there_yet(level: str, maker: str, steps: int, tmp_path: Path) -> None:
    """Before the first step, and of parameters that have had no gradient: torch would make them by a step of its own,
    which counts. Writing changes nothing, and what is read goes on as if it had not stopped, from any state."""
    ends = []
    for how in ("alone", "written", "read", "read by one that is further"):
        run = Run(level, maker)
        run.train(0, steps)
        if how != "alone":
            before = run.everything()
            save_sharded(tmp_path / how, **run.parts)
            assert alike(before, run.everything())
        if how.startswith("read"):
            run.session.close()
            run = Run(level, maker)
            run.train(50, 50 if how == "read" else 53, late=True)
            load_sharded(tmp_path / how, **run.parts)
            assert alike(before, run.everything())
        run.train(steps, steps + 2)
        run.train(steps + 2, steps + 4, late=True)
        ends.append(run.everything())
        run.session.close()
    assert all(alike(ends[0], end) for end in ends[1:])


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_prepared_model_is_its_masters_without_its_session(level: str, tmp_path: Path) -> None:
    run, other = Run(level, "torch AdamW"), Run(level, "torch AdamW")
    run.train(0, 2)
    other.train(50, 52)
    for each, work in ((run, save_sharded), (other, load_sharded)):
        work(tmp_path / "parts", model=each.model, optimizer=each.optimizer)
    assert alike(run.everything(), other.everything())
    save_sharded(tmp_path / "parts", **run.parts)
    with pytest.warns(preamp.PreampWarning, match="after 2 steps"):
        load_sharded(tmp_path / "parts", model=other.model, optimizer=other.optimizer)
    run.session.close()
    other.session.close()


@pytest.mark.parametrize("level", ["O0", "O5"])
def test_gradients_that_wait_for_their_step(level: str, tmp_path: Path) -> None:
    """They stay where they are, also where there are no states yet."""
    ends = []
    for saves in (False, True):
        run = Run(level, "torch AdamW")
        run.backward(0)
        if saves:
            save_sharded(tmp_path / "parts", **run.parts)
            other = Run(level, "torch AdamW")
            other.backward(5)
            gradients = [p.grad for p in other.model.parameters()]
            load_sharded(tmp_path / "parts", **other.parts)
            assert all(p.grad is gradient for p, gradient in zip(other.model.parameters(), gradients, strict=True))
            assert not other.optimizer.state
            other.session.close()
        run.session.step()
        run.session.zero_grad()
        ends.append(run.everything())
        run.session.close()
    assert alike(*ends)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", LATEST])
def test_damage_anywhere_is_told_and_nothing_is_loaded(name: str, tmp_path: Path) -> None:
    """Any bit, any length, and a file that is gone. torch itself reads most flipped bits as other numbers."""
    run = Run("O5", "AdamW")
    run.train(0, 2)
    save_sharded(tmp_path, **run.parts)
    run.train(2, 3)
    before = run.everything()
    file = next(path for path in tmp_path.rglob(name))
    whole = file.read_bytes()
    chance = random.Random(0)
    for case in range(60):
        changed = bytearray(whole)
        bit = chance.randrange(8 * len(whole))
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed if case % 6 else whole[: bit // 8])
        with pytest.raises(CheckpointError, match=r"damaged|cannot be read"):
            load_sharded(tmp_path, **run.parts)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"is missing|no 'latest'"):
        load_sharded(tmp_path, **run.parts)
    assert alike(before, run.everything())
    file.write_bytes(whole)
    load_sharded(tmp_path, **run.parts)
    assert not alike(before, run.everything())
    run.session.close()


class Bomb:
    def __init__(self, at: Path) -> None:
        self.at = at

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.at),)


@pytest.mark.parametrize("where", ["contents", "numbers", "tensors", "not a table"])
def test_files_that_want_to_run_code(where: str, tmp_path: Path) -> None:
    """With digests that are right, as whoever made them would see to."""
    from torch.distributed.checkpoint.state_dict_saver import save as save_parts

    run = Run("O4", "torch AdamW")
    run.train(0, 2)
    save_sharded(tmp_path, **run.parts)
    before = run.everything()
    latest = read(tmp_path / LATEST)
    parts, gone = tmp_path / str(latest["generation"]), tmp_path / "gone off"
    if where in ("contents", "not a table"):
        evil: Any = Bomb(gone) if where == "contents" else {"state_dict_metadata": {}}
        (parts / ".metadata").write_bytes(pickle.dumps(evil))
    else:
        model: Any = dict(run.model.state_dict())
        key = "lr" if where == "numbers" else "params"
        groups = [{**run.optimizer.state_dict()["param_groups"][0], key: Bomb(gone)}]
        if where == "tensors":
            model["first.weight"] = Bomb(gone)
        shutil.rmtree(parts)
        with pytest.warns(UserWarning, match=r"torch.distributed"):
            save_parts({"model": model, "optimizer": {"state": {}, "param_groups": groups}}, checkpoint_id=parts)
    files = {path.name: sha256_of(path) for path in parts.iterdir()}
    write(tmp_path / LATEST, {"generation": latest["generation"], "amp": latest["amp"], "files": files})
    with pytest.raises(CheckpointError, match="nothing was"):
        load_sharded(tmp_path, **run.parts)
    assert not gone.exists() and alike(before, run.everything())
    run.session.close()


class Attribute:
    """Pickled as the members of enumerations are by Python 3.11.0 to 3.11.3."""

    def __init__(self, *of: Any) -> None:
        self.of = of

    def __reduce__(self) -> Any:
        return getattr, self.of


def test_members_of_enumerations_are_read_as_every_python_writes_them() -> None:
    from torch.distributed.checkpoint import metadata

    from preamp.checkpoint._parts import _Contents

    kind: Any = metadata._MEM_FORMAT_ENCODING  # type: ignore[attr-defined]
    for member in kind:
        for written in (member, Attribute(kind, member.name)):
            assert _Contents(io.BytesIO(pickle.dumps(written))).load() is member
    for evil in (Attribute(metadata.Metadata, "__init__"), Attribute(kind, "__class__"), Attribute(os, "mkdir")):
        with pytest.raises((pickle.UnpicklingError, KeyError)):
            _Contents(io.BytesIO(pickle.dumps(evil) if evil.of[0] is not os else b"cos\nmkdir\n.")).load()


@pytest.mark.parametrize("library", [torch.optim, preamp.optim])
def test_codes_under_the_names_of_moments_are_not_loaded(library: Any, tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["exp_avg"] = torch.full((64, 64), 120, dtype=torch.int8)
    save_sharded(tmp_path, model=model, optimizer=optimizer)
    other = library.AdamW(model.parameters())
    with pytest.raises(CheckpointError, match="exp_avg"):
        load_sharded(tmp_path, model=model, optimizer=other)
    assert not other.state
