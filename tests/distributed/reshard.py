"""Trains some steps on the ranks that there are, from where a folder left off; says what it loaded and where it ended.

torchrun --nproc-per-node N reshard.py FOLDER LEVEL KIND OUT.json
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import preamp

from .together import begin

WHOLE = StateDictOptions(full_state_dict=True)


class Made:
    """A sharded model, its optimizer, its session."""

    def __init__(self, level: str, kind: str) -> None:
        policy = preamp.policy(level)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 9))
        fully_shard(self.model[0], mp_policy=policy.fsdp())
        fully_shard(self.model, mp_policy=policy.fsdp())
        make: Any = torch.optim.AdamW if kind == "torch" else preamp.optim.AdamW
        options: dict[str, Any] = {"states": "8bit"} if kind == "8bit" else {}
        self.optimizer = make(self.model.parameters(), lr=1e-2, **options)
        self.session = preamp.prepare(self.model, self.optimizer, level=level)

    def train(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            torch.manual_seed(step)
            with self.session.autocast():
                loss = self.model(torch.randn(6, 8)).float().square().mean()
                loss = loss * torch.inf if step == 3 else loss
            self.session.backward(loss)
            self.session.clip_grad_norm_(0.5)
            self.session.step()
            self.session.zero_grad()

    def whole(self) -> dict[str, Any]:
        """Everything, on rank 0: parameters, states, scale, counters."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=WHOLE)
        return {"model": model, "optimizer": optimizer, "amp": self.session.state_dict()}

    def digest(self) -> str:
        digest = hashlib.sha256()

        def add(value: Any) -> None:
            if isinstance(value, torch.Tensor):
                digest.update(f"{value.dtype}{tuple(value.shape)}{value.tolist()}".encode())
            elif isinstance(value, dict):
                for key in sorted(value, key=str):
                    digest.update(str(key).encode())
                    add(value[key])
            elif isinstance(value, (list, tuple)):
                for item in value:
                    add(item)
            else:
                digest.update(repr(value).encode())

        add(self.whole())
        return digest.hexdigest()


def main() -> None:
    folder, level, kind, out = Path(sys.argv[1]), *sys.argv[2:4], Path(sys.argv[4])
    begin()
    made = Made(level, kind)
    told: dict[str, Any] = {"loaded": None, "as from the whole": None}
    first = 0
    if (folder / "latest").exists():
        preamp.checkpoint.load_sharded(folder, model=made.model, optimizer=made.optimizer, session=made.session)
        told["loaded"] = made.digest()
        first = made.session.steps
    made.train(first, first + 5)
    if first:  # the same steps of a run that got the whole state, by torch's own means
        other, kept = Made(level, kind), torch.load(folder / "whole.pt", weights_only=False)
        set_state_dict(
            other.model, other.optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"],
            options=WHOLE,
        )  # fmt: skip
        other.session.load_state_dict(kept["amp"])
        other.train(first, first + 5)
        told["as from the whole"] = other.digest() == made.digest()
    preamp.checkpoint.save_sharded(folder, model=made.model, optimizer=made.optimizer, session=made.session)
    told["saved"] = made.digest()
    told["skipped"], told["scale"] = made.session.skipped, made.session.loss_scale()
    whole = made.whole()
    if dist.get_rank() == 0:
        torch.save(whole, folder / "whole.pt")
        out.write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads outlive their group where a mesh holds it, and now and then abort an exit
