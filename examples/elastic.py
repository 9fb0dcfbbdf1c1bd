"""Training that survives a killed process: save often, and resume from the last checkpoint.

    python -m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 2 examples/elastic.py

When a rank dies, the launcher ends the others and restarts all of them, up to `--max-restarts` times. They read the
last checkpoint and continue from there; the result is, bit for bit, that of a run without interruption. That takes
three things: a checkpoint is complete or absent; it holds all that the next step depends on; and the data are a
function of the step, not of how often the job was started. `docs/reliability.md` says more.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

import preamp


def batch(step: int, device: torch.device, size: int = 64) -> tuple[Tensor, Tensor]:
    """A batch for this rank and step: points on a sine wave."""
    chance = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    x = torch.rand(size, 1, generator=chance) * 6 - 3
    return x.to(device), x.sin().to(device)


def join(backend: str) -> None:
    """Join the ranks of this start; a prefix hides the addresses that an earlier start has left in the store."""
    store, rank, world = next(rendezvous("env://"))
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(backend, store=dist.PrefixStore(f"start {start}", store), rank=rank, world_size=world)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, default=Path("elastic.pt"))
    parser.add_argument("--level", default="O2")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    join("nccl" if cuda else "gloo")
    torch.manual_seed(0)  # the same start on every rank
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    optimizer = preamp.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    session = preamp.prepare(model, optimizer, level=options.level)

    first = 0
    if options.checkpoint.exists():  # every rank reads the same file, before the model is wrapped
        content = preamp.checkpoint.load(options.checkpoint, model=model, optimizer=optimizer, session=session)
        schedule.load_state_dict(content["schedule"])
        first = content["step"]
        print(f"rank {dist.get_rank()} goes on at step {first}", flush=True)
    wrapped = DistributedDataParallel(model)

    for step in range(first, options.steps):
        x, y = batch(step, device)
        with session.autocast():
            loss = nn.functional.mse_loss(wrapped(x).float(), y)
        session.backward(loss)
        session.clip_grad_norm_(1.0)
        session.step()
        session.zero_grad()
        schedule.step()
        done = step + 1
        if dist.get_rank() == 0 and (done % options.save_every == 0 or done == options.steps):
            preamp.checkpoint.save(
                options.checkpoint, model=model, optimizer=optimizer, session=session, schedule=schedule, step=done
            )
    if dist.get_rank() == 0:
        print(f"step {options.steps}: loss {loss.item():.2g}" if first < options.steps else "nothing left to do")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
