"""FSDP2 on four ranks, on meshes of two dimensions too: four ranks know, and do, what one process does."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import preamp

from .together import BOUNDS, DEVICE, clipped_steps, put_infinity, tell

MAKERS: dict[str, Callable[..., Any]] = {
    "SGD": preamp.optim.SGD,
    "torch SGD": torch.optim.SGD,
    "LAMB": lambda params, lr: preamp.optim.LAMB(params, lr / 10, weight_decay=0.05),
    "NovoGrad": lambda params, lr: preamp.optim.NovoGrad(params, lr / 10, weight_decay=0.05),
    "AdamW in 8 bits": lambda params, lr: preamp.optim.AdamW(params, lr / 100, eps=1e-6, states="8bit"),
    "Lion": lambda params, lr: preamp.optim.Lion(params, lr / 10),
    "Muon": lambda params, lr: _muon(list(params), lr),
    "NovoGrad, largest": lambda params, lr: preamp.optim.NovoGrad(params, lr / 10, norm_type=0),
}
CASES = [
    *[("O0", maker) for maker in MAKERS],
    *[("O2", maker) for maker in ("SGD", "torch SGD", "LAMB", "NovoGrad", "AdamW in 8 bits")],
    *[("O4", maker) for maker in ("torch SGD", "LAMB")],
    *[("O1", "SGD"), ("O5", "NovoGrad"), ("O2", "Muon"), ("O5", "Muon")],
]
KINDS = ("flat", "hybrid", "tensor")
"""Shards over all ranks; copies of shards; shards of tensor-parallel parts."""


def _muon(params: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
    matrices, others = ([p for p in params if (p.dim() == 2) is two] for two in (True, False))
    return [preamp.optim.Muon(matrices, lr / 10), preamp.optim.SGD(others, lr)]


def build() -> nn.Sequential:
    """Some ranks hold nothing of the last layer, which has one row. The one before it has rows of whole blocks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 9), nn.LayerNorm(9), nn.Linear(9, 1))


def train(model: nn.Module, level: str, maker: str) -> dict[str, Any]:
    """Five steps on the same data in every rank; one rank meets an infinity in the fourth."""
    optimizer = MAKERS[maker](model.parameters(), lr=0.1)
    first = next(model.parameters())
    last = dist.get_world_size() - 1
    with preamp.prepare(model, optimizer, level=level, scale=1024.0 if level in ("O1", "O2") else None) as session:
        told = clipped_steps(session, model, 5, lambda step: put_infinity(first.grad, last) if step == 3 else None)
        scale = session.loss_scale()
    whole: list[Any] = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    weights = [p.flatten().tolist() for p in whole]
    return {**told, "scale": scale, "weights": weights}


def shard(model: nn.Sequential, mesh: Any, level: str) -> None:
    options: dict[str, Any] = {} if level == "O0" else {"mp_policy": preamp.policy(level).fsdp()}
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh, **options)


def act(folder: Path) -> dict[str, Any]:
    flat = init_device_mesh(DEVICE, (4,))
    crossed = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "tensor"))
    told: dict[str, Any] = {}
    for level, maker in CASES:
        told[f"alone {level} {maker}"] = train(build(), level, maker)
        for kind in KINDS:
            model = build()
            if kind == "tensor":
                parallelize_module(model, crossed["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            shard(model, {"flat": flat, "hybrid": crossed, "tensor": crossed["data"]}[kind], level)
            told[f"{kind} {level} {maker}"] = train(model, level, maker)
    return told


ROUGH = {"AdamW in 8 bits": 3e-2, "Muon": 3e-2, "Lion": 3e-2}
"""What rounds by chances of each rank's own, in bfloat16, or to a sign."""

RANKS = 4
pytestmark = pytest.mark.slow  # several processes train for half a minute


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("level", "maker"), CASES)
def test_ranks_agree_and_step_as_one_process(told: list[dict[str, Any]], kind: str, level: str, maker: str) -> None:
    alone = told[0][f"alone {level} {maker}"]
    every = [rank[f"{kind} {level} {maker}"] for rank in told]
    sick = [each["norms"].pop(3) for each in every]
    assert all(each == every[0] for each in every)
    assert every[0]["skips"] == alone["skips"] == [False, False, False, True, False]
    assert every[0]["names"] == alone["names"]
    assert not math.isfinite(sick[-1])  # copies of a shard differ there, as only the last rank's was spoilt
    assert kind == "hybrid" or not any(map(math.isfinite, sick))
    wanted = [norm for index, norm in enumerate(alone["norms"]) if index != 3]
    bound = max(BOUNDS[level], ROUGH.get(maker, 0))
    assert every[0]["norms"] == pytest.approx(wanted, rel=bound)
    start = torch.cat([p.detach().flatten() for p in build().parameters()])
    mine, theirs = (torch.tensor([*chain(*each["weights"])]) for each in (every[0], alone))
    if maker == "Muon" and level != "O0":  # gradients of rank 4: of their rounding Muon makes directions like any other
        bound = 0.3
    assert float((mine - theirs).norm() / (theirs - start).norm()) <= bound


if __name__ == "__main__":
    tell(act)
