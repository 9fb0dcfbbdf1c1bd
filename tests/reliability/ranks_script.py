"""Two ranks under DistributedDataParallel, one of which has a bad day; run by test_ranks.py.

ranks_script.py agree FOLDER | sulks
"""

from __future__ import annotations

import hashlib
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import preamp

LEVELS = ("O1", "O2", "O4", "O5")
"""Those of runs.LEVELS, which a script cannot import."""

PLANTED = {2: (0, "inf"), 4: (1, "nan"), 5: (1, "inf"), 8: (0, "nan")}
"""At which step which rank alone has what for a loss."""


def fingerprint(*states: Any) -> str:
    digest = hashlib.sha256()
    for tensor in preamp.tree.tensors(states):
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Job:
    def __init__(self, level: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer = preamp.optim.AdamW(self.model.parameters(), 1e-2)
        self.session = preamp.prepare(self.model, self.optimizer, level=level)
        self.wrapped = DistributedDataParallel(self.model)

    def step(self, index: int, factor: float = 1.0) -> preamp.StepReport:
        chance = torch.Generator().manual_seed(2 * index + dist.get_rank())
        x, y = torch.randn(16, 8, generator=chance), torch.randint(4, (16,), generator=chance)
        with self.session.autocast():
            loss = nn.functional.cross_entropy(self.wrapped(x).float(), y)
        self.session.backward(loss * factor)
        report = self.session.step()
        self.session.zero_grad()
        return report

    def told(self, report: preamp.StepReport) -> dict[str, Any]:
        return {
            "skipped": report.skipped, "scale": self.session.loss_scale(), "count": self.session.skipped,
            "steps": self.session.steps,
            "state": fingerprint(self.model.state_dict(), self.optimizer.state_dict(), self.session.state_dict()),
        }  # fmt: skip


def looked_at_in_float32(job: Job) -> None:
    """In the midst of training; the steps after it are as they would have been."""
    with job.session.full_precision(), torch.no_grad():
        assert job.model(torch.randn(2, 8)).dtype is torch.float32
        assert {p.dtype for p in job.model.parameters()} == {torch.float32}


def agree(folder: Path) -> None:
    for level in LEVELS:
        job = Job(level)
        scale = job.session.loss_scale()
        for index in range(10):
            if index == 6:
                looked_at_in_float32(job)
            rank, value = PLANTED.get(index, (-1, "1"))
            report = job.step(index, float(value) if rank == dist.get_rank() else 1.0)
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, job.told(report))
            assert every[0] == every[1], (level, index, every)
            bad = sum(planted <= index for planted in PLANTED)
            wanted = {"skipped": index in PLANTED, "count": bad, "steps": index + 1}
            wanted["scale"] = scale / 2**bad if level in ("O1", "O2") else 1.0
            assert {key: every[0][key] for key in wanted} == wanted, (level, index, every[0], wanted)
        if dist.get_rank() == 0:
            preamp.checkpoint.export(folder / level, job.session)
            masters = job.session.state_dict()["masters"] or dict(job.model.named_parameters())
            torch.save({name: value.detach().clone() for name, value in masters.items()}, folder / f"{level}.pt")
        job.session.close()
        print(f"rank {dist.get_rank()} agrees at {level}", flush=True)


def main(what: str, *rest: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=5 if what == "sulks" else 60))
    if what == "agree":
        agree(Path(rest[0]))
    job = Job("O2")
    for index in range(10):
        try:
            if index == 3 and dist.get_rank() == 1:
                raise ZeroDivisionError("in the forward pass")
            job.step(index)
        except ZeroDivisionError:
            if what == "agree":
                raise
            print("rank 1 has caught it and waits", flush=True)
            time.sleep(100)
        except Exception as error:
            print(f"rank {dist.get_rank()} ends at step {index}: {type(error).__name__}", flush=True)
            raise


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
