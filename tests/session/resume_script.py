"""Trains every level and prints a hash of all its state; run in three ways by test_state.py."""

from __future__ import annotations

import hashlib
import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import preamp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


def main(folder: Path, part: str) -> None:
    torch.set_num_threads(1)
    for level in LEVELS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4, fused=level in ("O2", "O4"))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=40)
        session = preamp.prepare(model, optimizer, level=level, **({"scale": "dynamic"} if level == "O3" else {}))
        file = folder / f"{level}.pt"
        first, last = {"whole": (0, 20), "first": (0, 10), "second": (10, 20)}[part]
        if part == "second":
            content = preamp.checkpoint.load(file, model=model, optimizer=optimizer, session=session)
            schedule.load_state_dict(content["schedule"])
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(16, 6, generator=generator)
            with session.autocast():
                loss = F.cross_entropy(model(x), (x.sum(1) > 0).long())
            session.backward(loss * (float("inf") if step == 7 else 1.0))
            session.clip_grad_norm_(1.0)
            session.step()
            session.zero_grad()
            schedule.step()
        if part == "first":
            assert session.skipped >= 1
            preamp.checkpoint.save(file, model=model, optimizer=optimizer, session=session, schedule=schedule)
        digest = hashlib.sha256()
        state = [model.state_dict(), optimizer.state_dict(), session.state_dict()]
        for tensor in preamp.tree.tensors(state):
            digest.update(tensor.detach().float().numpy().tobytes())
        print(level, digest.hexdigest(), session.steps, session.skipped, session.loss_scale())
        session.close()


if __name__ == "__main__":
    warnings.simplefilter("error", preamp.PreampWarning)
    main(Path(sys.argv[1]), sys.argv[2])
