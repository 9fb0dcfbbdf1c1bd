"""Two ranks under DistributedDataParallel, one of which has a bad day: it "raises" or "sulks"; for test_ranks.py."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import preamp


class Job:
    def __init__(self, level: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer = preamp.optim.AdamW(self.model.parameters(), 1e-2)
        self.session = preamp.prepare(self.model, self.optimizer, level=level)
        self.wrapped = DistributedDataParallel(self.model)

    def step(self, index: int) -> None:
        chance = torch.Generator().manual_seed(2 * index + dist.get_rank())
        x, y = torch.randn(16, 8, generator=chance), torch.randint(4, (16,), generator=chance)
        with self.session.autocast():
            loss = nn.functional.cross_entropy(self.wrapped(x).float(), y)
        self.session.backward(loss)
        self.session.step()
        self.session.zero_grad()


def main(what: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=5 if what == "sulks" else 60))
    job = Job("O2")
    for index in range(10):
        try:
            if index == 3 and dist.get_rank() == 1:
                raise ZeroDivisionError("in the forward pass")
            job.step(index)
        except ZeroDivisionError:
            if what == "raises":
                raise
            print("rank 1 has caught it and waits", flush=True)
            time.sleep(100)
        except Exception as error:
            print(f"rank {dist.get_rank()} ends at step {index}: {type(error).__name__}", flush=True)
            raise


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
