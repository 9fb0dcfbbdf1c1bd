"""Models that FSDP2 still holds gathered: after a forward pass without backward the root's parameters are whole, and
plain tensors in 16 bits, until the next backward pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import preamp
from preamp.errors import SessionError
from preamp.lr_finder import sweep
from preamp.sharding import full_tensor

from .together import tell

LEVELS = ("O0", "O1", "O2", "O4", "O5")


def build(level: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.LayerNorm(4))
    options: dict[str, Any] = {} if level == "O0" else {"mp_policy": preamp.policy(level).fsdp()}
    fully_shard(model[0], **options)
    fully_shard(model, **options)
    return model


class Run:
    """Trained after an evaluation, or not, and evaluated after every step, or not."""

    def __init__(self, level: str, maker: Any, evaluates: bool) -> None:
        self.model: Any = build(level)
        self.sharded: list[Any] = list(self.model.parameters())
        self.evaluates = evaluates
        self.gathered: list[bool] = []
        optimizer = maker(self.model.parameters(), lr=0.1)
        self.evaluate()
        scale = 256.0 if level in ("O1", "O2") else None
        self.session = preamp.prepare(self.model, optimizer, level=level, scale=scale)

    def evaluate(self) -> None:
        if self.evaluates:
            with torch.no_grad():
                self.model(torch.ones(2, 8))
            self.gathered.append(not hasattr(self.model[2].weight, "to_local"))

    def train(self, steps: int) -> None:
        for step in range(steps):
            torch.manual_seed(step)
            with self.session.autocast():
                loss = self.model(torch.randn(4, 8)).float().square().mean()
            self.session.backward(loss)
            self.evaluate()  # before the step: what it gathers must not be what the next forward pass computes with
            if step == 2:
                self.sharded[2].grad.to_local()[0, 0] = torch.inf
            report = self.session.step()
            self.session.zero_grad()
            self.evaluate()
            if step == 2:
                self.names = list(report.nonfinite)  # which evaluation must not make unknown

    def read(self) -> tuple[list[Tensor], bool]:
        """The weights, and whether the model may run in float32."""
        self.evaluate()
        if self.evaluates:  # a range test puts back the shards, too
            batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(9))]
            sweep(self.session, batches, lambda x: self.model(x).float().square().mean(), start_lr=0.1, steps=4)
        self.evaluate()
        try:
            with self.session.full_precision():
                runs = True
        except SessionError:
            runs = False
        self.evaluate()
        with self.session.full_precision(values_only=True):
            return [full_tensor(p.detach()).clone() for p in self.model.parameters()], runs


def act(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for level in LEVELS:
        for kind, maker in (("torch", torch.optim.SGD), ("preamp", preamp.optim.SGD)):
            runs = [Run(level, maker, evaluates) for evaluates in (True, False)]
            for run in runs:
                run.train(4)
            (weights, may), (expected, _) = runs[0].read(), runs[1].read()
            dtypes = {str(w.dtype) for w in weights}
            told[f"{level} {kind}"] = {
                "gathered": all(runs[0].gathered), "names": runs[0].names, "runs": may, "dtypes": sorted(dtypes),
                "same": all(map(torch.equal, weights, expected)),
            }  # fmt: skip
            for run in runs:
                run.session.close()
    return told


if __name__ == "__main__":
    tell(act)
