"""Several processes against one on the joined batch, at every level: the same parameters after 50 steps, and skips.

Where the order of the arithmetic allows it they are the same bits: with the same batch on every rank the mean over
ranks is what each has. Else sums over rows are made in another order, in the dtype that the level computes in.

    torchrun --nproc-per-node N -m tests.distributed.test_equal OUT.json OPTIONS LEVEL...

OPTIONS, with commas: "ddp"; options of DistributedDataParallel; "hook", gradients exchanged in 16 bits; "same", all
ranks get the same batch. Every step has two micro-batches ("same": one) and is clipped; in some steps one rank alone
meets an infinity, in one of its micro-batches.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import preamp

from .together import BOUNDS, tell, told_by

OPTIONS = sys.argv[2].split(",") if __name__ == "__main__" else []
SAME = "same" in OPTIONS
STEPS, MICRO, ROWS = 50, 1 if SAME else 2, 4
BAD = {7: (0, 0), 20: (1, 0), 21: (1, MICRO - 1)}
"""Step: rank and micro-batch in which the loss is infinite."""
FEATURES, CLASSES = 12, 3


class Net(nn.Module):
    """A norm, a layer that splits unevenly over ranks, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.norm = nn.LayerNorm(16)
        self.again = nn.Linear(16, 16)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = self.again(torch.tanh(self.again(x)))
        return self.last(x)


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + (0 if SAME else rank))
    x = torch.randn(ROWS, FEATURES, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    maker: Any = torch.optim.SGD if kind == "torch" else preamp.optim.SGD
    return maker(model.parameters(), lr=0.05, momentum=0.9)


def alone(level: str, kind: str, world: int) -> tuple[list[Tensor], list[float], int]:
    """One process and the batches of all ranks as one."""
    model = build()
    optimizer = optimizer_of(kind, model)
    scales = []
    with preamp.prepare(model, optimizer, level=level) as session:
        for step in range(STEPS):
            for micro in range(MICRO):
                parts = [batch(step, micro, rank) for rank in range(1 if SAME else world)]
                x, y = (torch.cat(part) for part in zip(*parts, strict=True))
                with session.autocast():
                    loss = nn.functional.cross_entropy(model(x).float(), y) / MICRO
                    loss = loss * torch.inf if BAD.get(step, (0, -1))[1] == micro else loss
                session.backward(loss)
            session.clip_grad_norm_(1.0)
            session.step()
            session.zero_grad()
            scales.append(session.loss_scale())
        skipped = session.skipped
    return [p.detach() for p in model.parameters()], scales, skipped


def together(level: str, kind: str) -> tuple[list[Tensor], list[float], int, list[float]]:
    """This rank's part."""
    rank = dist.get_rank()
    model = build()
    optimizer = optimizer_of(kind, model)
    scales, norms = [], []
    with preamp.prepare(model, optimizer, level=level) as session:
        options = {name: True for name in OPTIONS if name not in ("ddp", "hook", "same")}
        outer = nn.parallel.DistributedDataParallel(model, **options)  # type: ignore[arg-type]
        if "hook" in OPTIONS:
            outer.register_comm_hook(None, preamp.parallel.compress_hook(preamp.policy(level).compute))
        for step in range(STEPS):
            for micro in range(MICRO):
                last = micro == MICRO - 1
                x, y = batch(step, micro, rank)
                with nullcontext() if last else session.no_sync(outer):
                    with session.autocast():
                        loss = nn.functional.cross_entropy(outer(x).float(), y) / MICRO
                        loss = loss * torch.inf if BAD.get(step) == (rank % 2, micro) and rank < 2 else loss
                    session.backward(loss, sync=last)
            norms.append(float(session.clip_grad_norm_(1.0)))
            session.step()
            session.zero_grad()
            scales.append(session.loss_scale())
        skipped = session.skipped
        del outer
    return [p.detach() for p in model.parameters()], scales, skipped, norms


def apart(mine: list[Tensor], theirs: list[Tensor]) -> float:
    """Distance of the ends over the way from the start."""
    start = [p.detach() for p in build().parameters()]
    gap = torch.stack([(a - b).norm() for a, b in zip(mine, theirs, strict=True)]).norm()
    way = torch.stack([(a - b).norm() for a, b in zip(theirs, start, strict=True)]).norm()
    return float(gap.detach() / way.detach())


def act(folder: Path) -> dict[str, Any]:
    told = {}
    for level in sys.argv[3:]:
        for kind in ("torch", "preamp"):
            mine, scales, skipped, norms = together(level, kind)
            wanted, wanted_scales, wanted_skipped = alone(level, kind, dist.get_world_size())
            told[f"{level} {kind}"] = {
                "parameters": [p.flatten().tolist() for p in mine], "scales": scales, "norms": norms,
                "skipped": skipped, "alone": [wanted_scales, wanted_skipped], "apart": apart(mine, wanted),
            }  # fmt: skip
    return told


pytestmark = pytest.mark.slow  # processes of their own; `test_parted` and `test_sharded` are always run

LEVELS = ("O0", "O1", "O2", "O4", "O5")


@pytest.mark.parametrize(("ranks", "options", "levels"), [
    (2, "ddp", LEVELS), (4, "ddp", LEVELS), (2, "ddp,gradient_as_bucket_view,find_unused_parameters", ("O2", "O5")),
    (2, "ddp,hook", ("O1",)), (2, "ddp,same,static_graph", ("O0", "O2", "O5")), (4, "ddp,same", LEVELS),
], ids=str)  # fmt: skip
def test_ranks_end_where_one_does(tmp_path: Path, ranks: int, options: str, levels: tuple[str, ...]) -> None:
    first, *others = told_by("test_equal", ranks, tmp_path, options, *levels)
    assert len(first) == 2 * len(levels)
    for what, facts in first.items():
        assert all(str(each[what]) == str(facts) for each in others), what  # bit for bit, and norms that are NaN
        assert [facts["scales"], facts["skipped"]] == facts["alone"] and facts["skipped"] == 3, what
        assert facts["apart"] <= (0.0 if "same" in options else BOUNDS[what.split()[0]]), (what, facts["apart"])


if __name__ == "__main__":
    tell(act)
