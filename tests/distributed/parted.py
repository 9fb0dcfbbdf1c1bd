"""Tensor parallelism without FSDP2, where 16-bit DTensors have DTensors for masters; what came of it goes to OUT.json.

torchrun --nproc-per-node 2 parted.py OUT.json
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import preamp
from preamp.errors import PreampError
from preamp.sharding import full_tensor

MAKERS: dict[str, Callable[..., Any]] = {
    "torch SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.5),
    "SGD": lambda params: preamp.optim.SGD(params, 0.1, momentum=0.5),
    "torch AdamW": lambda params: torch.optim.AdamW(params, 1e-3, eps=1e-5),
    "AdamW, split": lambda params: preamp.optim.AdamW(params, 1e-3, eps=1e-5, master="split"),
    "AdamW, split, 8 bits": lambda params: preamp.optim.AdamW(params, 1e-3, eps=1e-5, master="split", states="8bit"),
    "LAMB": lambda params: preamp.optim.LAMB(params, 1e-2),
}
CASES = [
    *[(level, maker) for level in ("O0", "O1", "O2", "O3", "O4", "O5") for maker in ("torch SGD", "SGD")],
    *[("O5", maker) for maker in list(MAKERS)[2:]],
    ("O2", "torch AdamW"),
]
FOLDER = Path(sys.argv[1]).parent if len(sys.argv) > 1 else Path()


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 1024), nn.GELU(), nn.Linear(1024, 6), nn.LayerNorm(6), nn.Linear(6, 3))


class Run:
    """A model, parted or not, with its optimizer and its session."""

    def __init__(self, level: str, maker: str, mesh: Any = None) -> None:
        self.model = build()
        if mesh is not None:
            parallelize_module(self.model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        self.optimizer = MAKERS[maker](self.model.parameters())
        scale = 1024.0 if level in ("O1", "O2", "O3") else None
        self.session = preamp.prepare(self.model, self.optimizer, level=level, scale=scale)
        self.norms: list[float] = []
        self.skips: list[bool] = []

    def train(self, begin: int, end: int, *, spoilt: int = -1) -> None:
        for step in range(begin, end):
            torch.manual_seed(step)
            with self.session.autocast():
                loss = self.model(torch.randn(4, 8)).float().square().mean()
            self.session.backward(loss)
            if step == spoilt:
                gradient: Any = self.model[0].weight.grad
                if not hasattr(gradient, "to_local"):
                    gradient[0, 0] = torch.inf
                elif dist.get_rank() == 1:
                    gradient.to_local()[0, 0] = torch.inf
            self.norms.append(float(self.session.clip_grad_norm_(0.5)))
            self.skips.append(self.session.step().skipped)
            self.session.zero_grad()

    def weights(self) -> list[Tensor]:
        with self.session.full_precision():
            return [full_tensor(p.detach()).clone() for p in self.model.parameters()]

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "session": self.session}


def told_of(level: str, maker: str, mesh: Any) -> dict[str, Any]:
    """Trained, saved, trained on, and once more from what was saved; beside one process."""
    alone, run = Run(level, maker), Run(level, maker, mesh)
    alone.train(0, 5, spoilt=1)
    run.train(0, 3, spoilt=1)
    folder = FOLDER / f"{level} {maker}"
    preamp.checkpoint.save_sharded(folder, **run.parts())
    run.train(3, 5)
    ends, start = run.weights(), [p.detach() for p in build().parameters()]
    far = torch.cat([(a - b).flatten() for a, b in zip(ends, alone.weights(), strict=True)]).norm()
    way = torch.cat([(a - b).flatten() for a, b in zip(alone.weights(), start, strict=True)]).norm()
    with run.session.full_precision():
        validated = run.model(torch.ones(2, 8)).dtype is torch.float32
    dtype = {p.dtype for p in run.model.parameters()}
    run.session.close()
    closed = all(torch.equal(full_tensor(p.detach()), end) for p, end in zip(run.model.parameters(), ends, strict=True))
    alone.session.close()
    again = Run(level, maker, mesh)
    preamp.checkpoint.load_sharded(folder, **again.parts())
    again.train(3, 5)
    resumed = all(map(torch.equal, again.weights(), ends))
    with torch.no_grad():
        again.model[0].bias.zero_()
    followed = float(again.weights()[1].abs().max()) < 1e-30  # split masters keep the bits below
    again.session.close()
    return {
        "norms": run.norms, "norms alone": alone.norms, "skips": run.skips, "apart": float(far / way),
        "resumed": resumed, "validated": validated, "closed": closed, "followed": followed,
        "dtypes": sorted(map(str, dtype)),
    }  # fmt: skip


def whole_masters(mesh: Any) -> str:
    """A session's state of one process, loaded where masters have parts."""
    alone, run = Run("O5", "SGD"), Run("O5", "SGD", mesh)
    state = alone.session.state_dict()
    before = run.weights()
    try:
        run.session.load_state_dict(state)
        said = "nothing was said"
    except PreampError as error:
        said = f"{error}" if all(map(torch.equal, before, run.weights())) else "something was loaded"
    alone.session.close()
    run.session.close()
    return said


def stage() -> str:
    """A pipeline's: other ranks have other parameters of the same names."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with preamp.prepare(model, optimizer, level="O4", group=dist.group.WORLD) as session:
        try:
            preamp.checkpoint.save_sharded(FOLDER / "stage", model=model, optimizer=optimizer, session=session)
        except PreampError as error:
            return f"{error}"
    return "nothing was said"


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    told: dict[str, Any] = {f"{level} {maker}": told_of(level, maker, mesh) for level, maker in CASES}
    told |= {"whole": whole_masters(mesh), "stage": stage()}
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, told)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads outlive their group where a mesh holds it, and now and then abort an exit
