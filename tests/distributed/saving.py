"""Two ranks write what neither holds whole: in the background, to safetensors, and where one of them fails."""

from __future__ import annotations

import errno
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import preamp
from preamp.checkpoint import _save, _sharded

from .together import DEVICE, tell

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
        result: Tensor = self.head(self.norm(self.embed(x)))
        return result


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
            with self.session.autocast():
                loss = self.model(torch.randint(12, (8,))).float().square().mean()
            self.session.backward(loss)
            self.session.step()
            self.session.zero_grad()

    def whole(self) -> dict[str, Tensor]:
        state = self.model.state_dict()
        return {name: v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for name, v in state.items()}

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "session": self.session}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n].cpu(), right[n].cpu()) for n in left)


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
        _save._thread.submit(int).result()  # after the warning
    told["warned"] = [str(each.message)[:40] for each in heard if each.category is preamp.errors.PreampWarning]
    _sharded.write = write
    preamp.checkpoint.load_sharded(there, **run.parts)
    told["the one before"] = same(run.whole(), saved)
    preamp.checkpoint.save_sharded(there, **run.parts)
    told["generations"] = len([path for path in there.iterdir() if path.is_dir()])
    _sharded._SEEN_WITHIN = 0.2
    own = folder / f"of rank {dist.get_rank()}"
    told["not shared"], _ = error_of(lambda: preamp.checkpoint.save_sharded(own, **run.parts))
    told["not there"], _ = error_of(lambda: preamp.checkpoint.load_sharded(own, **run.parts))
    run.session.close()
    return told


def exported(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for level in ("O1", "O5"):
        run = Run(level)
        run.train(3)
        path = folder / f"{level}.safetensors"
        preamp.checkpoint.export(path, run.session, metadata={"run": "7"})
        want = run.whole()
        want.pop("head.weight")
        told[level] = path.exists() and same(load_file(path), want)
        told[f"{level} goes on"], _ = error_of(lambda run=run: run.train(1))  # type: ignore[misc]
        run.session.close()
    nowhere = folder / "no folder" / "model.safetensors"
    told["nowhere"], _ = error_of(lambda: preamp.checkpoint.export(nowhere, run.model))
    mesh = init_device_mesh(DEVICE, (2,))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
    want = {name: value.clone() for name, value in plain.state_dict().items()}
    parallelize_module(plain, mesh, {"0": ColwiseParallel()})
    preamp.checkpoint.export(folder / "tp.safetensors", plain)
    told["tensor parallel"] = same(load_file(folder / "tp.safetensors"), want)
    return told


def act(folder: Path) -> dict[str, Any]:
    return {part.__name__: part(folder) for part in (in_the_background, one_that_fails, exported)}


if __name__ == "__main__":
    tell(act)
