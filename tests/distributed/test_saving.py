"""Checkpoints of what no rank holds whole, on two ranks; a rank that fails is told of on both, at once."""

from __future__ import annotations

import errno
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import preamp
from preamp.checkpoint import _save, _sharded
from preamp.errors import CheckpointError
from preamp.kernels import join, split
from preamp.sharding import full_tensor

from ..session.toys import step_of_squares
from .together import tell

LEVEL = "O5"


class Tied(nn.Module):
    """An embedding that is the head's weight too, a norm with buffers, a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 12)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(x)))


class Run:
    """A sharded model, its optimizer, its session."""

    def __init__(self, level: str = LEVEL) -> None:
        torch.manual_seed(0)
        policy = preamp.policy(level)
        self.model = Tied()
        fully_shard(self.model.norm, mp_policy=policy.fsdp(full=True))
        fully_shard(self.model, mp_policy=policy.fsdp())
        self.optimizer = preamp.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.session = preamp.prepare(self.model, self.optimizer, level=level)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            torch.manual_seed(self.session.steps)
            step_of_squares(self.session, self.model, torch.randint(12, (8,)))

    def whole(self) -> dict[str, Tensor]:
        state = self.model.state_dict()
        return {name: v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for name, v in state.items()}

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "session": self.session}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n].cpu(), right[n].cpu()) for n in left)


class Wide(nn.Module):
    """A matrix whose moments are cut between blocks, one whose blocks are cut, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(256, 96, bias=False), nn.Linear(96, 63)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


FORMS: dict[str, dict[str, Any]] = {
    "float32": {}, "split, 8 bits": {"master": "split", "states": "8bit"},
    "split24, 8 bits": {"master": "split24", "states": "8bit"},
}  # fmt: skip
PLACED = ("whole", "rows and columns", "fully")
"""How a model is placed. Shards of `fully_shard` are float32, and have no masters."""


class Form:
    """A model in one form, whole or in shards."""

    def __init__(self, form: str, placed: str) -> None:
        self.model = Wide()
        if placed == "fully":
            fully_shard(self.model, mp_policy=preamp.policy(LEVEL).fsdp())
        elif placed != "whole":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            parallelize_module(self.model, mesh, {"one": ColwiseParallel(), "two": RowwiseParallel()})
        self.optimizer = preamp.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-4, **FORMS[form])
        self.session = preamp.prepare(self.model, self.optimizer, level=LEVEL)
        self.parts = {"model": self.model, "optimizer": self.optimizer, "session": self.session}
        self.keeps_24 = form.startswith("split24") and placed != "fully"

    def train(self, steps: int) -> None:
        for _ in range(steps):
            torch.manual_seed(self.session.steps)
            step_of_squares(self.session, self.model, torch.randn(8, 256))

    def held(self) -> list[Tensor]:
        """Weights in float32 and both moments, gathered, in the order of parameters."""
        with self.session.full_precision(values_only=True):
            weights = [full_tensor(p.detach()).clone() for p in self.model.parameters()]
        states = preamp.optim.float32_states(self.optimizer.state_dict())["state"]
        rows = [states[number] for number in sorted(states)]
        return [*weights, *(full_tensor(row[name]).clone() for row in rows for name in ("exp_avg", "exp_avg_sq"))]

    def has(self, wanted: list[Tensor]) -> bool:
        """Whether it holds these weights as it keeps them, and these moments as near as its codes can be."""
        rounded = [join(*split(w, torch.int8)) if self.keeps_24 else w for w in wanted[:3]]
        pairs = list(zip(self.held(), [*rounded, *wanted[3:]], strict=True))
        alike = (torch.allclose(a, b, rtol=0.0626, atol=float(b.abs().max()) * 1e-4) for a, b in pairs[3:])
        return all(torch.equal(a, b) for a, b in pairs[:3]) and all(alike)


def forms(folder: Path) -> dict[str, Any]:
    """What is written in each form and place, read in each."""
    told: dict[str, Any] = {}
    ways = [(form, placed) for form in FORMS for placed in PLACED]
    for mine in ways:
        source = Form(*mine)
        source.train(2)
        wanted, there = source.held(), folder / "-".join(mine)
        preamp.checkpoint.save_sharded(there, **source.parts)
        for theirs in ways:
            target = Form(*theirs)
            preamp.checkpoint.load_sharded(there, **target.parts)
            told[f"{mine} as {theirs}"] = target.has(wanted)
            if mine == theirs:
                told[f"{mine}, all"] = all(map(torch.equal, target.held(), wanted))
                for run in (source, target):
                    run.train(2)
                told[f"{mine} goes on"] = all(map(torch.equal, source.held(), target.held()))
            target.session.close()
        source.session.close()
    return told


def alone(folder: Path) -> dict[str, Any]:
    """bfloat16 shards without a session, whose masters the optimizer keeps, in each form."""

    def made(form: str) -> tuple[Any, Any]:
        model = fully_shard(Wide().bfloat16())
        return model, preamp.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, **FORMS[form])

    def train(model: Any, optimizer: Any) -> None:
        for step in range(2):
            torch.manual_seed(step)
            model(torch.randn(8, 256).bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def masters(model: Any, optimizer: Any) -> list[Tensor]:
        rows = [(p, optimizer.state[p]) for p in model.parameters()]
        wide = [row["master"] if "master" in row else join(p.detach(), row["master_bits"]) for p, row in rows]
        return [full_tensor(each).clone() for each in wide]

    told: dict[str, Any] = {}
    for mine in FORMS:
        model, optimizer = made(mine)
        train(model, optimizer)
        wanted = masters(model, optimizer)
        preamp.checkpoint.save_sharded(folder / f"alone {mine}", model=model, optimizer=optimizer)
        for theirs in FORMS:
            model, optimizer = made(theirs)
            preamp.checkpoint.load_sharded(folder / f"alone {mine}", model=model, optimizer=optimizer)
            kept = [join(*split(w, torch.int8)) if theirs.startswith("split24") else w for w in wanted]
            told[f"{mine} as {theirs}"] = all(map(torch.equal, masters(model, optimizer), kept))
            train(model, optimizer)
    return told


def error_of(act: Callable[[], Any]) -> tuple[str, float]:
    begin = time.monotonic()
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "", time.monotonic() - begin


def in_the_background(folder: Path) -> dict[str, Any]:
    run = Run()
    run.train(3)
    saved = run.whole()
    pending = preamp.checkpoint.save_sharded_async(folder / "later", **run.parts)
    run.train(4)
    pending.result(60)
    ended = run.whole()
    preamp.checkpoint.load_sharded(folder / "later", **run.parts)
    told = {"moved": not same(saved, ended), "as when it was asked for": same(run.whole(), saved)}
    told["steps"] = run.session.steps
    run.train(4)
    told["goes on alike"] = same(run.whole(), ended)
    first, second = (preamp.checkpoint.save_sharded_async(folder / "later", **run.parts) for _ in range(2))
    preamp.checkpoint.save_sharded(folder / "later", **run.parts)  # waits for them
    told["waited"] = first.done() and second.done()
    told["generations"] = sorted(path.name for path in (folder / "later").iterdir())
    run.session.close()
    return told


def one_that_fails(folder: Path) -> dict[str, Any]:
    run = Run()
    run.train(1)
    there = folder / "full"
    preamp.checkpoint.save_sharded(there, **run.parts)
    saved = run.whole()
    run.train(1)
    write: Any = _sharded.write

    def full(path: Any, content: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    told: dict[str, Any] = {}
    if dist.get_rank() == 0:
        _sharded.write = full
    told["error"], told["seconds"] = error_of(lambda: preamp.checkpoint.save_sharded(there, **run.parts))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        pending = preamp.checkpoint.save_sharded_async(there, **run.parts)
        told["later"], _ = error_of(pending.result)
        _save.finish()  # after the warning
    told["warned"] = [str(each.message)[:40] for each in heard if each.category is preamp.errors.PreampWarning]
    _sharded.write = write
    preamp.checkpoint.load_sharded(there, **run.parts)
    told["the one before"] = same(run.whole(), saved)
    preamp.checkpoint.save_sharded(there, **run.parts)
    told["generations"] = len([path for path in there.iterdir() if path.is_dir()])
    own = folder / f"of rank {dist.get_rank()}"
    told["not shared"], _ = error_of(lambda: preamp.checkpoint.save_sharded(own, **run.parts))
    told["not there"], _ = error_of(lambda: preamp.checkpoint.load_sharded(own, **run.parts))
    run.session.close()
    return told


def gathered() -> dict[str, Any]:
    """The weights alone, as the page on reliability has it."""
    told: dict[str, Any] = {}
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for level in ("O1", "O5"):
        run = Run(level)
        run.train(3)
        with run.session.full_precision(values_only=True):
            weights = get_model_state_dict(run.model, options=whole)
        wanted = run.whole()
        told[level] = dist.get_rank() > 0 or same(weights, wanted)
        told[f"{level} goes on"], _ = error_of(lambda run=run: run.train(1))  # type: ignore[misc]
        run.session.close()
    return told


def act(folder: Path) -> dict[str, Any]:
    return {
        **{part.__name__: part(folder) for part in (in_the_background, one_that_fails, forms, alone)},
        "gathered": gathered(),
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_each_form_is_read_as_each_other_sharded_or_whole(told: list[dict[str, Any]], rank: int) -> None:
    seen = told[rank]["forms"]
    assert len(seen) == 9 * 9 + 2 * 9 and not [name for name, right in seen.items() if not right]
    seen = told[rank]["alone"]
    assert len(seen) == 9 and not [name for name, right in seen.items() if not right]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_in_the_background_is_of_the_moment_it_was_asked_for(told: list[dict[str, Any]], rank: int) -> None:
    seen = told[rank]["in_the_background"]
    assert seen["moved"] and seen["as when it was asked for"] and seen["goes on alike"] and seen["waited"]
    assert seen["steps"] == 3
    assert seen["generations"] == ["latest", "preamp-00000004"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_fails_all_and_the_checkpoint_before_stays(
    told: list[dict[str, Any]], rank: int
) -> None:
    seen = told[rank]["one_that_fails"]
    for error in (seen["error"], seen["later"]):
        assert "No space left" in error
        assert error.startswith("OSError" if rank == 0 else "CheckpointError: the checkpoint was not written")
    assert seen["seconds"] < 30  # of the half hour that a rank waits for another
    assert seen["the one before"] and seen["generations"] == 1
    assert len(seen["warned"]) == 1 and seen["warned"][0].startswith("a checkpoint was not saved")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_that_is_not_shared_is_told(told: list[dict[str, Any]], rank: int) -> None:
    seen = told[rank]["one_that_fails"]
    assert "a folder that they share" in seen["not shared"]
    assert "no 'latest'" in seen["not there"]


@pytest.mark.parametrize("rank", [0, 1])
def test_torch_gathers_the_masters(told: list[dict[str, Any]], rank: int) -> None:
    seen = told[rank]["gathered"]
    assert seen["O1"] and seen["O5"]  # bit for bit
    assert not seen["O1 goes on"] and not seen["O5 goes on"]


def test_one_process_without_a_group_writes_at_once(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    before = model.weight.detach().clone()
    pending = preamp.checkpoint.save_sharded_async(tmp_path / "run", model=model, optimizer=optimizer)
    assert pending.done()
    with torch.no_grad():
        model.weight.zero_()
    preamp.checkpoint.load_sharded(tmp_path / "run", model=model, optimizer=optimizer)
    assert torch.equal(model.weight, before)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises((OSError, CheckpointError), match="file"):
        preamp.checkpoint.save_sharded_async(tmp_path / "file", model=model, optimizer=optimizer)


@pytest.mark.parametrize("to", [torch.optim.AdamW, preamp.optim.AdamW])
def test_a_file_of_an_older_torch_goes_on(tmp_path: Path, to: Any) -> None:
    """torch 2.6 wrote groups of AdamW without `decoupled_weight_decay`; an option that is no flag is missed."""
    model = nn.Linear(3, 2)
    old = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5)
    model(torch.randn(4, 3)).square().mean().backward()
    old.step()
    old.param_groups[0].pop("decoupled_weight_decay", None)
    preamp.checkpoint.save_sharded(tmp_path / "old", model=model, optimizer=old)
    moment = old.state[model.weight]["exp_avg"].clone()
    new = to(model.parameters(), 0.2)
    preamp.checkpoint.load_sharded(tmp_path / "old", model=model, optimizer=new)
    assert torch.equal(new.state[model.weight]["exp_avg"], moment)
    group = new.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.5)
    assert group.get("decoupled_weight_decay", True) and "foreach" in group
    new.step()
    with pytest.raises(CheckpointError, match="momentum"):
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        preamp.checkpoint.load_sharded(tmp_path / "old", model=model, optimizer=sgd)


if __name__ == "__main__":
    tell(act)
