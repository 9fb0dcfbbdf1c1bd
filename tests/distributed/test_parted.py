"""Tensor parallelism by itself: two ranks train, save, validate and close as one process does, at every level."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import preamp
from preamp.errors import PreampError
from preamp.sharding import full_tensor

from ..session.toys import squares
from .together import BOUNDS, DEVICE, put_infinity, tell

# torch's own without foreach, its choice on a GPU, which cannot step tensors and DTensors together
MAKERS: dict[str, Callable[..., Any]] = {
    "torch SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.5, foreach=False),
    "SGD": lambda params: preamp.optim.SGD(params, 0.1, momentum=0.5),
    "torch AdamW": lambda params: torch.optim.AdamW(params, 1e-3, eps=1e-5, foreach=False),
    "AdamW, split": lambda params: preamp.optim.AdamW(params, 1e-3, eps=1e-5, master="split"),
    "AdamW, split, 8 bits": lambda params: preamp.optim.AdamW(params, 1e-3, eps=1e-5, master="split", states="8bit"),
    "SGD, split24": lambda params: preamp.optim.SGD(params, 0.1, momentum=0.5, master="split24"),
    "LAMB": lambda params: preamp.optim.LAMB(params, 1e-2),
}
CASES = [
    ("O0", "torch SGD"), ("O1", "SGD"), ("O2", "torch AdamW"), ("O3", "torch SGD"), ("O4", "torch SGD"),
    *[("O5", maker) for maker in MAKERS if maker != "torch SGD"],
]  # fmt: skip
SEQUENCE_CASES = [("O0", "torch AdamW"), ("O1", "LAMB"), ("O2", "SGD"), ("O5", "AdamW, split")]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 1024), nn.GELU(), nn.Linear(1024, 6), nn.LayerNorm(6), nn.Linear(6, 3))


class Block(nn.Module):
    """Of a transformer, without its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Words(nn.Module):
    """Tokens to logits; each rank has a part of every sequence, and the embedding's gradient is whole on all."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.norm = nn.Embedding(50, 16), Block(), nn.LayerNorm(16)
        self.head = nn.Linear(16, 50, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.float().abs() * 1e4).long() % 50
        return self.head(self.norm(self.block(self.embedding(tokens))))


def cut(model: nn.Module, mesh: Any) -> None:
    """Share a model out."""
    if not isinstance(model, Words):
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return
    along = Shard(1)
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=along),
        "block.norm": SequenceParallel(), "block.up": ColwiseParallel(input_layouts=along),
        "block.down": RowwiseParallel(output_layouts=along), "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=along, output_layouts=Replicate()),
    }  # fmt: skip
    parallelize_module(model, mesh, plan)


class Run:
    """A model, parted or not, with its optimizer and its session."""

    def __init__(self, level: str, maker: str, mesh: Any = None, *, words: bool = False) -> None:
        torch.manual_seed(0)
        self.model: Any = Words() if words else build()
        if mesh is not None:
            cut(self.model, mesh)
        self.optimizer = MAKERS[maker](self.model.parameters())
        scale = 1024.0 if level in ("O1", "O2", "O3") else None
        self.session = preamp.prepare(self.model, self.optimizer, level=level, scale=scale)
        self.norms: list[float] = []
        self.skips: list[bool] = []

    def train(self, begin: int, end: int, *, spoilt: int = -1) -> None:
        for step in range(begin, end):
            torch.manual_seed(step)
            squares(self.session, self.model, torch.randn(4, 8))
            if step == spoilt:
                put_infinity(next(m for m in self.model.modules() if isinstance(m, nn.Linear)).weight.grad, rank=1)
            self.norms.append(float(self.session.clip_grad_norm_(0.5)))
            self.skips.append(self.session.step().skipped)
            self.session.zero_grad(set_to_none=step % 2 == 0)

    def weights(self) -> list[Tensor]:
        with self.session.full_precision():
            return [full_tensor(p.detach()).clone() for p in self.model.parameters()]

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "session": self.session}


def told_of(level: str, maker: str, mesh: Any, folder: Path, *, words: bool = False) -> dict[str, Any]:
    """Trained, saved, trained on, and once more from what was saved; beside one process."""
    alone, run = Run(level, maker, words=words), Run(level, maker, mesh, words=words)
    start = [p.detach().clone().float() for p in alone.model.parameters()]
    alone.train(0, 5, spoilt=1)
    run.train(0, 3, spoilt=1)
    folder = folder / f"{level} {maker} {words}"
    preamp.checkpoint.save_sharded(folder, **run.parts())
    run.train(3, 5)
    ends = run.weights()
    far = torch.cat([(a - b).flatten() for a, b in zip(ends, alone.weights(), strict=True)]).norm()
    way = torch.cat([(a - b).flatten() for a, b in zip(alone.weights(), start, strict=True)]).norm()
    with run.session.full_precision():
        validated = run.model(torch.ones(2, 8)).dtype is torch.float32
    dtype = {p.dtype for p in run.model.parameters()}
    run.session.close()
    closed = all(torch.equal(full_tensor(p.detach()), end) for p, end in zip(run.model.parameters(), ends, strict=True))
    alone.session.close()
    again = Run(level, maker, mesh, words=words)
    preamp.checkpoint.load_sharded(folder, **again.parts())
    again.train(3, 5)
    resumed = all(map(torch.equal, again.weights(), ends))
    with torch.no_grad():
        next(again.model.parameters()).zero_()
    followed = float(again.weights()[0].abs().max()) < 1e-30  # split masters keep the bits below
    again.session.close()
    return {
        "norms": run.norms, "norms alone": alone.norms, "skips": run.skips, "apart": float(far / way),
        "resumed": resumed, "validated": validated, "closed": closed, "followed": followed,
        "dtypes": sorted(map(str, dtype)),
    }  # fmt: skip


def whole_masters(mesh: Any) -> str:
    """A session's state of one process, loaded where masters have parts."""
    alone, run = Run("O5", "SGD"), Run("O5", "SGD", mesh)
    state = alone.session.state_dict()
    before = run.weights()
    try:
        run.session.load_state_dict(state)
        said = "nothing was said"
    except PreampError as error:
        said = f"{error}" if all(map(torch.equal, before, run.weights())) else "something was loaded"
    alone.session.close()
    run.session.close()
    return said


def stage(folder: Path) -> str:
    """A pipeline's: other ranks have other parameters of the same names."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with preamp.prepare(model, optimizer, level="O4", group=dist.group.WORLD) as session:
        try:
            preamp.checkpoint.save_sharded(folder / "stage", model=model, optimizer=optimizer, session=session)
        except PreampError as error:
            return f"{error}"
    return "nothing was said"


def act(folder: Path) -> dict[str, Any]:
    mesh = init_device_mesh(DEVICE, (2,))
    told: dict[str, Any] = {f"{level} {maker}": told_of(level, maker, mesh, folder) for level, maker in CASES}
    for level, maker in SEQUENCE_CASES:
        told[f"words {level} {maker}"] = told_of(level, maker, mesh, folder, words=True)
    return {**told, "whole": whole_masters(mesh), "stage": stage(folder)}


KEYS = [(level, f"{level} {maker}") for level, maker in CASES]
KEYS += [(level, f"words {level} {maker}") for level, maker in SEQUENCE_CASES]


@pytest.mark.parametrize(("level", "key"), KEYS)
def test_training_is_that_of_one_process(told: list[dict[str, Any]], level: str, key: str) -> None:
    first, second = (each[key] for each in told)
    assert first["norms"] == second["norms"]
    assert first["skips"] == second["skips"] == [False, True, False, False, False]  # the infinity lay in one rank
    assert first["apart"] <= BOUNDS[level]
    assert first["norms"] == pytest.approx(first["norms alone"], rel=BOUNDS[level])
    low = str(preamp.policy(level).params)
    assert low in first["dtypes"]


@pytest.mark.parametrize("what", ["resumed", "validated", "closed", "followed"])
@pytest.mark.parametrize("key", [key for _, key in KEYS])
def test_masters_of_parts_do_what_masters_do(told: list[dict[str, Any]], key: str, what: str) -> None:
    assert all(each[key][what] for each in told)


def test_whole_masters_are_not_loaded_into_parts(told: list[dict[str, Any]]) -> None:
    assert all("is whole in the state and sharded here" in each["whole"] for each in told)


def test_stages_are_not_written_over_each_other(told: list[dict[str, Any]]) -> None:
    assert all("into a file of its own" in each["stage"] for each in told)


if __name__ == "__main__":
    tell(act)
