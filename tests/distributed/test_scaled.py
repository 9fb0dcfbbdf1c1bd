"""`preamp.GradScaler` where ranks hold parts: an infinity on one of them skips the step on all, and all scales fall."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import preamp

from .test_parted import Words, cut
from .together import DEVICE, put_infinity, tell

MAKERS: dict[str, Callable[..., Any]] = {
    "torch": lambda params: torch.optim.SGD(params, 0.1, momentum=0.5, foreach=False),
    "preamp": lambda params: preamp.optim.SGD(params, 0.1, momentum=0.5),
    "LAMB": lambda params: preamp.optim.LAMB(params, 1e-2),
}
SCHEDULES = ("backoff", "hysteresis")
CASES = [
    (shared, maker, clips, schedule)
    for shared in ("tensors", "shards")
    for maker in MAKERS
    for clips in (True, False)
    for schedule in (SCHEDULES if maker == "preamp" else SCHEDULES[:1])
]


def train(shared: str | None, maker: str, clips: bool, schedule: str, mesh: Any) -> dict[str, Any]:
    """Five steps; in the third one rank meets an infinity."""
    torch.manual_seed(0)
    model: Any = Words()
    if shared == "tensors":
        cut(model, mesh)
    elif shared == "shards":
        fully_shard(model.block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = MAKERS[maker](model.parameters())
    scaler = preamp.GradScaler(DEVICE, init_scale=2.0**10, schedule=schedule)
    skips, scales = [], []
    for step in range(5):
        torch.manual_seed(step)
        with preamp.autocast(DEVICE, torch.bfloat16):
            loss = model(torch.randn(4, 8)).float().square().mean()
        scaler.scale(loss).backward()
        if step == 2:
            put_infinity(model.block.up.weight.grad, rank=1)
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        scaler.step(optimizer)
        skips.append(scaler.skipped)
        scaler.update()
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    weights: list[Any] = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return {"skips": skips, "scales": scales, "weights": torch.cat([w.flatten() for w in weights]).tolist()}


def act(folder: Path) -> dict[str, Any]:
    mesh = init_device_mesh(DEVICE, (2,))
    told = {}
    for case in CASES:
        told[str(case)] = train(*case, mesh)
        told[str((None, *case[1:]))] = train(None, *case[1:], mesh)
    return told


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_agree_and_step_as_one_process(told: list[dict[str, Any]], case: tuple[Any, ...]) -> None:
    first, second = (each[str(case)] for each in told)
    alone = told[0][str((None, *case[1:]))]
    assert first == second
    assert first["skips"] == alone["skips"] == [False, False, True, False, False]
    assert first["scales"] == alone["scales"]
    torch.manual_seed(0)
    start = torch.cat([p.detach().flatten() for p in Words().parameters()])
    mine, theirs = torch.tensor(first["weights"]), torch.tensor(alone["weights"])
    assert float((mine - theirs).norm() / (theirs - start).norm()) <= 3e-2


if __name__ == "__main__":
    tell(act)
