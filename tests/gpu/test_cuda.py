"""What only a CUDA device can show: the same rules there, no waiting for it, real float16 training."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
import torch.nn.functional as F

import preamp
from preamp.zoo import TASKS, Recipe

from .training import batch, network, train_step

pytestmark = pytest.mark.gpu

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


def last_losses(level: str) -> float:
    """The mean of the last 20 of 200 steps."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, eps=1e-4, fused=True)
    with preamp.prepare(model, optimizer, level=level) as session:
        step = train_step(model, session)
        losses = [step(*batch(index)) for index in range(200)]
    return float(torch.stack(losses[-20:]).mean())


@pytest.mark.parametrize("level", LEVELS)
def test_levels_learn_as_float32_does(level: str) -> None:
    assert last_losses(level) == pytest.approx(last_losses("O0"), abs=0.15 if level == "O3" else 0.05)


@pytest.mark.parametrize("logged", [False, True])
def test_logging_skips_costs_no_wait(logged: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The row of skips is read once in `patience` steps, and what else is told comes with it."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, fused=True)
    x, y = batch(0)
    caplog.set_level(logging.INFO if logged else logging.ERROR, logger="preamp")
    waits = []
    with preamp.prepare(model, optimizer, level="O1", scale=preamp.DynamicScale(patience=5)) as session:
        for step in range(20):
            with session.autocast():
                loss = F.cross_entropy(model(x), y) * (float("inf") if step in (6, 12, 13) else 1.0)
            session.backward(loss)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                session.step()
                torch.cuda.set_sync_debug_mode("default")
            waits.append(len(caught))
            session.zero_grad()
    assert waits[5:] == [0, 0, 0, 0, 1] * 3
    wanted = [f"{n} of the last 5 steps were skipped: a gradient was not finite" for n in (1, 2)]
    assert [record.getMessage() for record in caplog.records] == (wanted if logged else [])


@pytest.mark.parametrize("name", sorted(TASKS))
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_full_size_networks_take_steps_at_every_level(name: str, level: str) -> None:
    """A few real steps; the data packages are not on every GPU machine."""
    run_trial = pytest.importorskip("preamp.demo").run_trial
    task = TASKS[name]
    try:
        next(iter(task.batches("full", seed=0, steps=1, batch_size=2)))
    except preamp.errors.MissingExtra as missing:
        pytest.skip(str(missing))
    recipe = task.recipe("full", quick=True)
    short = Recipe(**{**recipe.__dict__, "steps": 6, "batch_size": min(8, recipe.batch_size)})
    trial = run_trial(task, level, size="full", seed=0, device=torch.device("cuda"), recipe=short)
    assert trial.complete and trial.peak_bytes > 0
    assert all(torch.isfinite(torch.tensor(trial.losses)))
