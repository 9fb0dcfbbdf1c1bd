"""Trains at every level under DistributedDataParallel, and says of each whether its ranks ended alike."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import preamp
from preamp.errors import SessionError


def zero(kind: type[torch.optim.Optimizer]) -> Any:
    """The same optimizer, of whose states every rank keeps a part."""
    return lambda parameters, **options: ZeroRedundancyOptimizer(parameters, kind, **options)


def train(level: str, make: Any, **options: object) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = make(model.parameters(), lr=1e-2, **options)
    with preamp.prepare(model, optimizer, level=level) as session:
        wrapped = nn.parallel.DistributedDataParallel(model)
        data = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(6):
            x, y = torch.randn(16, 8, generator=data), torch.randint(4, (16,), generator=data)
            with session.autocast():
                loss = nn.functional.cross_entropy(wrapped(x).float(), y)
            session.backward(loss)
            session.step()
            optimizer.zero_grad()
        mine = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    try:
        wrapped(torch.randn(2, 8))
        later = "trains on"
    except SessionError as error:
        later = "refused" if "wrap the model anew" in str(error) else str(error)
    if later != ("refused" if level in ("O2", "O3", "O5") else "trains on"):
        return f"after close(): {later}"
    every = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return "same" if all(torch.equal(every[0], each) for each in every) else "parted"


def main() -> None:
    dist.init_process_group("gloo")
    for level in sys.argv[1:]:
        told = {"torch": train(level, torch.optim.AdamW), "preamp": train(level, preamp.optim.AdamW)}
        told["zero-torch"] = train(level, zero(torch.optim.AdamW))
        told["zero-preamp"] = train(level, zero(preamp.optim.AdamW))
        if level == "O5":
            told["split"] = train(level, preamp.optim.AdamW, master="split")
        if dist.get_rank() == 0:
            for name, outcome in told.items():
                print(f"{level} {name} {outcome}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
