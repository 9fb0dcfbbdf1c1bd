"""DistributedDataParallel before and after `prepare`: ranks stay equal with any optimizer, after `close()` too."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn

import preamp
from preamp.errors import SessionError

from .together import tell

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


def zero(kind: type[torch.optim.Optimizer]) -> Any:
    """The same optimizer, of whose states every rank keeps a part."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns of torch.jit as it is imported

    return lambda parameters, **options: ZeroRedundancyOptimizer(parameters, kind, **options)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def alike(model: nn.Module) -> bool:
    mine = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    every = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return all(torch.equal(every[0], each) for each in every)


def train(
    level: str, make: Any, *, first: bool = False, hook: str = "", frozen: bool = False, **options: object
) -> str:
    """Wrapped before `prepare` (`first`) or after it; on after `close()` with what DistributedDataParallel it has."""
    model = net()
    optimizer = make(model.parameters(), lr=1e-2, eps=1e-4, **options)  # an eps that float16 has, for O3
    data = torch.Generator().manual_seed(dist.get_rank())

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(16, 8, generator=data), torch.randint(4, (16,), generator=data)

    wrapped = nn.parallel.DistributedDataParallel(model) if first else None
    if wrapped is not None and hook == "torch's":
        wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    elif wrapped is not None and hook:
        wrapped.register_comm_hook(None, preamp.parallel.compress_hook())
    if frozen:
        gc.freeze()  # hides the wrapper from whoever looks for it
    with preamp.prepare(model if wrapped is None else wrapped, optimizer, level=level) as session:
        if wrapped is None:
            wrapped = nn.parallel.DistributedDataParallel(model)
        for _ in range(4):
            for half in range(2):
                x, y = batch()
                with session.no_sync(wrapped) if half == 0 else nullcontext():
                    with session.autocast():
                        loss = nn.functional.cross_entropy(wrapped(x).float(), y)
                    session.backward(loss, sync=half == 1)
            session.step()
            optimizer.zero_grad()
    if not alike(model):
        return "parted"
    if hook and not wrapped._get_ddp_logging_data().get("comm_hook"):
        return "lost its hook"
    for _ in range(3):
        x, y = batch()
        nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return "same" if alike(model) else "parted after close()"


def refused() -> str:
    """A wrapper that casts parameters by itself has no place here; model and wrapper are as before."""
    model = net()
    dtypes = torch.distributed.fsdp.MixedPrecision  # whatever it is, it is not None
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped.mixed_precision = dtypes(param_dtype=torch.bfloat16)
    try:
        preamp.prepare(wrapped, torch.optim.SGD(model.parameters(), 0.1), level="O5")
    except SessionError as error:
        wrapped.mixed_precision = None
        wrapped(torch.randn(2, 8) + dist.get_rank()).sum().backward()
        gradients = [torch.zeros_like(model[0].weight) for _ in range(dist.get_world_size())]
        dist.all_gather(gradients, model[0].weight.grad)
        exchanged = all(torch.equal(gradients[0], each) for each in gradients)
        good = (
            "mixed_precision" in str(error) and exchanged and all(p.dtype is torch.float32 for p in model.parameters())
        )
        return "same" if good else str(error)
    return "taken"


def in_full(level: str, first: bool) -> str:
    """A backward pass inside full_precision is exchanged, or refused."""
    model, rank = net(), dist.get_rank()
    optimizer = preamp.optim.SGD(model.parameters(), 0.1)
    wrapped = nn.parallel.DistributedDataParallel(model) if first else None
    with preamp.prepare(wrapped or model, optimizer, level=level) as session:
        wrapped = wrapped or nn.parallel.DistributedDataParallel(model)
        for inside in (False, True, False):
            with session.full_precision() if inside else session.autocast():
                loss = wrapped(torch.full((4, 8), rank + 1.0)).float().square().mean()
                try:
                    session.backward(loss)
                except SessionError as error:
                    if not inside or "let ranks part" not in str(error):
                        return str(error)
                    continue
            session.step()
            optimizer.zero_grad()
        return "same" if alike(model) else "parted"


def act(folder: Path) -> dict[str, str]:
    told = {}
    for level in LEVELS:
        for name, make in (("torch", torch.optim.AdamW), ("preamp", preamp.optim.AdamW)):
            told[f"{level} {name}"] = train(level, make)
            told[f"{level} {name}, sharded states"] = train(level, zero(make))
            told[f"{level} {name}, wrapped first"] = train(level, make, first=True)
        for first in (True, False):
            told[f"{level} inside full_precision, {first=}"] = in_full(level, first)
        for hook in ("preamp's", "torch's"):
            told[f"{level} {hook} hook"] = train(level, preamp.optim.AdamW, first=True, hook=hook)
    told["refused"] = refused()
    told["frozen"] = train("O5", torch.optim.AdamW, first=True, frozen=True)
    gc.unfreeze()
    return {**told, "split": train("O5", preamp.optim.AdamW, master="split")}


@pytest.mark.slow
def test_ranks_stay_equal_at_every_level(told: list[dict[str, str]]) -> None:
    for each in told:
        assert len(each) == 10 * len(LEVELS) + 3 and set(each.values()) == {"same"}, each


if __name__ == "__main__":
    tell(act)
