"""What a script lets go of, the doctor lets go of: a sweep over many models has the memory of one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from preamp.doctor.follow.watch import Watch
from preamp.doctor.records import Line, Rank, Recorder


@pytest.fixture
def watch() -> Iterator[Watch]:
    rank = Rank(0)
    made = Watch(Recorder(rank), Path.cwd(), 1, None, True)
    made.start()
    try:
        yield made
    finally:
        made.end()
        assert "failed" not in rank.facts, rank.facts["failed"]["trace"]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, region: bool, steps: int = 2) -> None:
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=region):
            loss = model(torch.ones(2, 10)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("region", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_models_and_optimizers_go_when_their_script_lets_go(watch: Watch, region: bool, wrapped: bool) -> None:
    models, optimizers, weights = [], [], []
    for _ in range(6):
        inner = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.Linear(20, 4))
        model = nn.DataParallel(inner) if wrapped else inner
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        train(model, optimizer, region)
        models.append(weakref.ref(inner))
        optimizers.append(weakref.ref(optimizer))
        weights.append(weakref.ref(inner[0].weight))
        del model, inner, optimizer
        gc.collect()
        assert [ref() for ref in models] == [None] * len(models)
        assert [ref() for ref in optimizers] == [None] * len(optimizers)
        assert sum(ref() is not None for ref in weights) <= 1, "those of a step whose updates are yet to be counted"
    assert watch.run.step == 2


@pytest.mark.slow
def test_an_id_that_is_given_again_is_another_optimizers(watch: Watch) -> None:
    model = nn.Linear(10, 4)
    seen: set[int] = set()
    lines: set[Line] = set()
    again = 0

    def made(turn: int) -> torch.optim.Optimizer:
        if turn % 2:
            return torch.optim.SGD(model.parameters(), lr=0.01)
        return torch.optim.SGD(model.parameters(), lr=0.02)

    for turn in range(6):
        kept = [made(turn)]
        while seen and id(kept[-1]) not in seen and len(kept) < 1000:  # CPython gives memory again, sooner or later
            kept.append(made(turn))
        optimizer = kept.pop()
        kept.clear()
        gc.collect()
        again += id(optimizer) in seen
        seen.add(id(optimizer))
        lines.add(watch.run.optimizers[optimizer])
        assert watch.run.step <= 1 and not watch.run.attempts.get(optimizer)
        train(model, optimizer, region=False, steps=1)
        assert watch.run.attempts[optimizer] == 1 and len(watch.run.optimizers) == 1
        del optimizer
        gc.collect()
    if not again:
        pytest.skip("no id was given again")
    assert len(lines) == 2
