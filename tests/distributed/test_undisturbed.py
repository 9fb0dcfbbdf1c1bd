"""On several ranks, too, what happens beside a training run changes no bit of it: each is made with and without it."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import preamp

from ..combined.events import BETWEEN, NEUTRAL, STEPS, Program, play, random_state, set_random_state
from ..combined.training import MAKERS, Net, Training, differences
from .together import DEVICE, tell, told_by

KINDS = {2: ("ddp", "late ddp", "fsdp", "tensor"), 4: ("hybrid", "parts")}
"""By ranks. With four: copies of shards, and shards of tensor-parallel parts."""
LEVELS = ("O0", "O1", "O2", "O4", "O5")
NOT_FOR: dict[str, tuple[str, ...]] = {
    # torch's own: hooks on shards are not called, a failed forward pass leaves a model gathered, what was gathered in
    # inference_mode stays an inference tensor, copies are not to be had
    "fsdp": ("copy_of_the_model", "functional_call", "frozen_and_not", "error_in_forward", "error_in_backward",
             "validation_in_float32", "inference", "states_read"),
    "tensor": ("copy_of_the_model", "functional_call"),
    # and what has begun to be reduced has to end
    "ddp": ("frozen_and_not", "error_in_backward"),
    "late ddp": ("frozen_and_not", "error_in_backward", "prepared_again"),
}  # fmt: skip


class Shared(Training):
    """One that is wrapped, or cut, for two ranks, which have the same data."""

    def __init__(self, kind: str, mesh: Any, folder: Path, *how: Any) -> None:
        self.kind, self.mesh, self.folder = kind, mesh, folder
        super().__init__(*how)

    def made(self) -> Net:
        model, level = Net(), self.how[0]
        if self.kind in ("tensor", "parts"):
            plan: dict[str, Any] = {
                "first": ColwiseParallel(output_layouts=Replicate()),
                "second": RowwiseParallel(input_layouts=Replicate()),
            }
            parallelize_module(model, self.mesh["tensor"], plan)
        if self.kind in ("fsdp", "hybrid", "parts"):
            options: dict[str, Any] = {} if level == "O0" else {"mp_policy": preamp.policy(level).fsdp()}
            for part in (model.first, model.second, model):
                fully_shard(part, mesh=self.mesh["data"] if self.kind == "parts" else self.mesh, **options)
        return model

    def prepare(self) -> None:
        self.called: Any = self.model
        if self.kind == "ddp":
            self.called = DistributedDataParallel(self.model)
        super().prepare()
        if self.kind == "late ddp":
            self.called = DistributedDataParallel(self.model)

    def forward(self, x: Tensor) -> Tensor:
        return self.called(x)

    def backward(self, x: Tensor | None = None, **how: bool) -> None:
        wrapped = [self.called] if isinstance(self.called, DistributedDataParallel) else []
        with contextlib.nullcontext() if how.get("sync", True) else self.session.no_sync(*wrapped):
            super().backward(x, **how)

    def saved(self) -> dict[str, Any]:
        return copy.deepcopy({n: getattr(self, n).state_dict() for n in ("model", "optimizer", "schedule", "session")})


def sharded_file(run: Shared) -> None:
    """Written by all ranks and read into objects that are made anew."""
    state, drawn = random_state(), copy.deepcopy(run.schedule.state_dict())
    parts = {name: getattr(run, name) for name in ("model", "optimizer", "session")}
    preamp.checkpoint.save_sharded(run.folder, **parts)
    run.session.close()
    run.build()
    parts = {name: getattr(run, name) for name in ("model", "optimizer", "session")}
    preamp.checkpoint.load_sharded(run.folder, **parts)
    run.schedule.load_state_dict(drawn)
    set_random_state(state)


EVENTS: dict[str, Any] = {**NEUTRAL, "read_from_a_file": sharded_file}


def program(chance: random.Random, kind: str) -> Program:
    """Steps, each with what happens before it and what between its micro-batches."""
    names = [name for name in EVENTS if name not in NOT_FOR.get(kind, NOT_FOR["fsdp"])]
    between = [name for name in BETWEEN if name in names]
    return [
        (chance.choice(list(STEPS)), chance.sample(names, chance.choice((0, 1, 2))), chance.sample(between, 1))
        for _ in range(6)
    ]


def _held(value: Any) -> Any:
    """With the parts of DTensors that lie here."""
    if isinstance(value, dict):
        return {key: _held(each) for key, each in value.items()}
    return value.to_local() if hasattr(value, "to_local") else value


def setup(chance: random.Random, kind: str) -> tuple[str, str, str]:
    level, maker = chance.choice(LEVELS), chance.choice([name for name in MAKERS if name != "AdamW, by chance"])
    sharded = kind in ("fsdp", "hybrid", "parts")
    if maker == "AdamW, split" and (level == "O2" or sharded):
        maker = "AdamW"
    if maker == "torch Adafactor" and sharded:
        maker = "torch AdamW"  # that one does not step shards
    if "torch" in maker and "SGD" not in maker and kind in ("tensor", "parts"):
        maker = "torch SGD"  # torch's own do not step DTensors of several meshes, or beside tensors
    return level, maker, chance.choice(("dynamic", "hysteresis", "static"))


def act(folder: Path) -> dict[str, Any]:
    ranks = dist.get_world_size()
    crossed = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "tensor")) if ranks == 4 else None
    mesh = crossed or init_device_mesh(DEVICE, (2,), mesh_dim_names=("tensor",))
    told = {}
    first, last = int(sys.argv[2]), int(sys.argv[3])
    for seed in range(first, last):
        chance = random.Random(seed)
        kind = KINDS[ranks][seed % len(KINDS[ranks])]
        how, steps = setup(chance, kind), program(chance, kind)
        ends: list[Any] = []
        for with_events in (False, True):
            torch.manual_seed(0)
            run = Shared(kind, mesh, folder / "parts", *how)
            try:
                ends.append(_held(play(run, steps, EVENTS if with_events else None)))
            except Exception as error:
                ends.append([with_events, *traceback.format_exception(error)[-4:]])
            finally:
                run.session.close()
        failed = [str(end) for end in ends if isinstance(end, list)]
        told[f"{kind} {how} {steps}"] = failed or differences(*ends)
    return told


def told(ranks: int, first: int, of_each_kind: int, folder: Path) -> dict[str, list[str]]:
    """What the ranks found changed, by run."""
    number = of_each_kind * len(KINDS[ranks])
    every = told_by("test_undisturbed", ranks, folder, str(first), str(first + number))
    assert all(len(each) == number for each in every)
    return {run: changed for each in every for run, changed in each.items() if changed}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "first", "of_each_kind"), [(2, 0, 6), (2, 100, 40), (4, 100, 15)])
def test_neutral_events(ranks: int, first: int, of_each_kind: int, tmp_path: Path) -> None:
    assert told(ranks, first, of_each_kind, tmp_path) == {}


if __name__ == "__main__":
    tell(act)
