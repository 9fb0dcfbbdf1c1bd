"""preamp.GradScaler with schedules other than torch's."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from torch.nn import Parameter

import preamp
from preamp.errors import ScaleError

MADE = {
    "torch's fused": lambda p: torch.optim.Adam(p, 1e-3, fused=True),
    "any": lambda p: torch.optim.SGD(p, 1e-3),
    "ours": lambda p: preamp.optim.Adam(p, 1e-3),
}


def train(scaler: preamp.GradScaler, optimizer: torch.optim.Optimizer, losses: list[float]) -> list[tuple[float, bool]]:
    params = optimizer.param_groups[0]["params"]
    seen = []
    for value in losses:
        optimizer.zero_grad()
        total = torch.stack([(param.float() * value).sum() for param in params]).sum()
        scaler.scale(total).backward()
        scaler.step(optimizer)
        skipped = scaler.skipped
        scaler.update()
        seen.append((scaler.get_scale(), skipped))
    return seen


@pytest.mark.parametrize("made", MADE)
def test_hysteresis_backs_off_after_k_bad_steps(made: str) -> None:
    scaler = preamp.GradScaler("cpu", init_scale=1024.0, schedule=preamp.HysteresisScale(1024.0, hysteresis=2))
    seen = train(scaler, MADE[made]([Parameter(torch.ones(3))]), [1.0, float("inf"), float("nan"), 1.0])
    assert [scale for scale, _ in seen] == [1024.0, 1024.0, 512.0, 512.0]
    assert [skipped for _, skipped in seen] == [False, True, True, False]


@pytest.mark.parametrize("schedule", ["backoff", "hysteresis"])
def test_state_goes_on_where_it_was(schedule: str) -> None:
    losses = [1.0, 1e3, float("inf"), 1e-3, 1.0, float("nan"), float("inf"), 1.0, 10.0] * 3
    whole = preamp.GradScaler("cpu", growth_interval=3, schedule=schedule)
    expected = train(whole, MADE["any"]([Parameter(torch.ones(3))]), losses)
    first = preamp.GradScaler("cpu", growth_interval=3, schedule=schedule)
    param = Parameter(torch.ones(3))
    train(first, MADE["any"]([param]), losses[:11])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = preamp.GradScaler("cpu", growth_interval=3, schedule=schedule)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert train(second, MADE["any"]([param]), losses[11:]) == expected[11:]
    assert pickle.loads(pickle.dumps(second)).get_scale() == second.get_scale()
    assert ("schedule" in second.state_dict()) == (schedule != "backoff")


def test_a_state_of_torchs_scaler_is_where_it_goes_on_from() -> None:
    reference = torch.amp.GradScaler("cpu", init_scale=4096.0)
    scaler = preamp.GradScaler("cpu", schedule="hysteresis")
    scaler.load_state_dict(reference.state_dict())
    assert scaler.get_scale() == 4096.0
    assert train(scaler, MADE["any"]([Parameter(torch.ones(3))]), [1.0])[0][0] == 4096.0


def test_misuse() -> None:
    with pytest.raises(ScaleError, match="schedule='growth'"):
        preamp.GradScaler("cpu", schedule="growth")
    scaler = preamp.GradScaler("cpu", schedule="hysteresis")
    scaler.scale(torch.ones(()))
    with pytest.raises(ScaleError, match="chooses the scale"):
        scaler.update(8.0)
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()
    preamp.GradScaler("cpu", schedule="hysteresis", enabled=False).update()
