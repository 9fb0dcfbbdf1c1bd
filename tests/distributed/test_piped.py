"""torch's pipeline schedules: stages without a loss step, skip and scale as the one that has it, and as one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import preamp
from preamp.errors import SessionError

from .together import DEVICE, tell

LEVELS = ("O0", "O1", "O2", "O4", "O5")
SCHEDULES: dict[str, Any] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
PIECES, STEPS, SICK = 4, 5, 2
"""Micro-batches, steps, and the step in which the first stage meets an infinity."""


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 5)
    )  # fmt: skip


def batch(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(step)
    return torch.randn(8, 8), torch.randint(5, (8,))


def prepared(model: nn.Module, level: str, **options: Any) -> preamp.Session:
    optimizer = preamp.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    return preamp.prepare(model, optimizer, level=level, scale=2.0**12 if level in ("O1", "O2") else None, **options)


def facts(session: preamp.Session, model: nn.Module, run: Callable[[int], Any], *, spoils: bool) -> dict[str, Any]:
    """What comes of clipped steps whose gradients `run` makes; `spoils`: this is where the infinity is met."""
    norms, skips = [], []
    for step in range(STEPS):
        run(step)
        if step == SICK and spoils:
            spoil(model)
        norms.append(float(session.clip_grad_norm_(0.5)))
        skips.append(session.step().skipped)
        session.zero_grad()
    counts = {"norms": norms, "skips": skips, "scale": session.loss_scale(), "steps": session.steps}
    session.close()
    return {**counts, "weights": [p.flatten().tolist() for p in model.parameters()]}


def alone(level: str) -> dict[str, Any]:
    model = build()
    session = prepared(model, level)

    def run(step: int) -> None:
        x, y = batch(step)
        for part, wanted in zip(x.chunk(PIECES), y.chunk(PIECES), strict=True):
            with session.autocast():
                loss = F.cross_entropy(model(part).float(), wanted) / PIECES
            session.backward(loss)

    return facts(session, model, run, spoils=True)


def piped(level: str, schedule: str) -> dict[str, Any]:
    rank, whole = dist.get_rank(), build()
    model = whole[:3] if rank == 0 else whole[3:]
    session = prepared(model, level, group=dist.group.WORLD)

    def criterion(output: Tensor, wanted: Tensor) -> Tensor:
        return session.scale(F.cross_entropy(output.float(), wanted))

    stage = PipelineStage(model, rank, 2, torch.device(DEVICE))
    schedules = SCHEDULES[schedule](stage, n_microbatches=PIECES, loss_fn=criterion)

    def run(step: int) -> None:
        x, y = batch(step)
        with session.autocast():
            schedules.step(x) if rank == 0 else schedules.step(target=y)

    return facts(session, model, run, spoils=rank == 0)


def unscaled(level: str) -> dict[str, Any]:
    """The loss function does not scale, and then it does."""
    rank, whole = dist.get_rank(), build()
    model = whole[:3] if rank == 0 else whole[3:]
    session = prepared(model, level, group=dist.group.WORLD)
    scales = False

    def criterion(output: Tensor, wanted: Tensor) -> Tensor:
        loss = F.cross_entropy(output.float(), wanted)
        return session.scale(loss) if scales else loss

    run = ScheduleGPipe(PipelineStage(model, rank, 2, torch.device(DEVICE)), n_microbatches=PIECES, loss_fn=criterion)
    told = {"said": "", "steps": 0}
    for step in range(3):
        x, y = batch(step)
        with session.autocast():
            run.step(x) if rank == 0 else run.step(target=y)
        try:
            session.step()
        except SessionError as error:
            told["said"], scales = f"{error}", True
        session.zero_grad()
    told["steps"] = session.steps
    session.close()
    return told


def spoil(model: nn.Module) -> None:
    gradient = next(model.parameters()).grad
    assert gradient is not None
    gradient[0, 0] = torch.inf


def act(folder: Path) -> dict[str, Any]:
    told = {f"{level} {name}": piped(level, name) for level in LEVELS for name in SCHEDULES}
    told |= {f"{level} unscaled": unscaled(level) for level in LEVELS}
    return {**told, **{f"{level} alone": alone(level) for level in LEVELS}}


pytestmark = pytest.mark.slow  # processes of their own; `test_parted` and `test_sharded` are always run


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("level", LEVELS)
def test_stages_train_as_one_process(told: list[dict[str, Any]], level: str, schedule: str) -> None:
    first, second = (each[f"{level} {schedule}"] for each in told)
    alone = told[0][f"{level} alone"]
    assert first["skips"] == second["skips"] == alone["skips"] == [step == SICK for step in range(STEPS)]
    assert first["norms"] == second["norms"]
    assert not math.isfinite(first["norms"][SICK])
    assert first["norms"] == pytest.approx(alone["norms"], rel=1e-6)
    assert (first["scale"], first["steps"]) == (second["scale"], second["steps"]) == (alone["scale"], STEPS)
    mine = [*chain(*first["weights"], *second["weights"])]
    assert mine == pytest.approx([*chain(*alone["weights"])], abs=1e-7, rel=0)


@pytest.mark.parametrize("level", LEVELS)
def test_a_loss_that_no_stage_scaled_is_told_before_the_first_step(told: list[dict[str, Any]], level: str) -> None:
    scales = level in ("O1", "O2")
    for each in told:
        seen = each[f"{level} unscaled"]
        assert ("session.scale(loss)" in seen["said"]) is scales
        assert seen["steps"] == (2 if scales else 3)


if __name__ == "__main__":
    tell(act)
