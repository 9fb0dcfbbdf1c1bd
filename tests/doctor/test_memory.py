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
from preamp.doctor.records import Rank, Recorder


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


def test_the_second_of_two_models_is_known_from_its_first_call(watch: Watch) -> None:
    first, second = nn.Linear(8, 16), nn.Linear(16, 4)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    with torch.autocast("cpu", torch.bfloat16):
        second(first(torch.ones(2, 8))).float().square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    rank = watch.run.recorder.sinks[0]
    assert isinstance(rank, Rank)
    assert {(one.module or "").rpartition(":")[1] for one in rank.findings if one.code == "PA105"} == {":"}
