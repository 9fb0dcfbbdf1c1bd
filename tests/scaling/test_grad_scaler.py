"""preamp.GradScaler beside torch's: the same trajectory bit for bit, and what it adds."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import Parameter

import preamp
from preamp.errors import ScaleError


def one(scaler: torch.amp.GradScaler, value: float, fused: bool = False) -> Parameter:
    parameter = Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], 0.1, fused=fused)
    scaler.scale((parameter * value).sum()).backward()
    scaler.step(optimizer)
    return parameter


def test_torchs_scale_dies_where_ours_does_not() -> None:
    """After enough bad steps torch's scale is so small that 1/scale is infinite, and it applies infinite steps."""
    theirs = torch.amp.GradScaler("cpu", init_scale=1e-40)
    assert not torch.isfinite(one(theirs, 1.0)).all(), "torch has mended this: say so in the documents"
    ours = preamp.GradScaler("cpu", init_scale=1.0, patience=None)
    for _ in range(200):
        assert torch.equal(one(ours, math.inf).detach(), torch.ones(3))
        ours.update()
    assert ours.get_scale() == 2.0**-126
    assert torch.allclose(one(ours, 1.0).detach(), torch.full((3,), 0.9))


def test_bounds_hold() -> None:
    scaler = preamp.GradScaler("cpu", 64.0, growth_interval=1, min_scale=16.0, max_scale=128.0)
    scales = []
    for value in (1.0, 1.0, 1.0, *[math.inf] * 5):
        one(scaler, value)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [128.0, 128.0, 128.0, 64.0, 32.0, 16.0, 16.0, 16.0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"init_scale": 0.0}, {"init_scale": -1.0}, {"init_scale": math.nan}, {"init_scale": math.inf},
        {"init_scale": 1e-40}, {"init_scale": "big"}, {"init_scale": True}, {"growth_factor": 1.0},
        {"growth_factor": 0.5}, {"growth_factor": math.nan}, {"backoff_factor": 1.0}, {"backoff_factor": 0.0},
        {"backoff_factor": -0.5}, {"growth_interval": 0}, {"growth_interval": -1}, {"growth_interval": 2.5},
        {"growth_interval": True}, {"min_scale": 0.0}, {"max_scale": math.inf}, {"min_scale": 2.0**20},
        {"max_scale": 1.0}, {"patience": 0}, {"patience": 1.5},
    ],
    ids=str,
)  # fmt: skip
def test_bad_arguments_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ScaleError):
        preamp.GradScaler("cpu", **arguments)
    if "patience" not in arguments:
        with pytest.raises(ScaleError):
            preamp.DynamicScale(**arguments)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("found", [1.0, math.inf])
@pytest.mark.parametrize("unscale", [True, False])
def test_complex_gradients(optimizer: type[torch.optim.Optimizer], found: float, unscale: bool) -> None:
    torch.manual_seed(0)
    parameters = [Parameter(torch.randn(4, dtype=torch.complex64)), Parameter(torch.randn(3))]
    plain = [Parameter(p.detach().clone()) for p in parameters]
    scaler, results = preamp.GradScaler("cpu", init_scale=1024.0), []
    for own, scaled in ((parameters, True), (plain, False)):
        made = optimizer(own, lr=0.1)
        loss = (own[0] * torch.tensor([1j, 1, 2, 3])).abs().square().sum() + own[1].square().sum()
        (scaler.scale(loss) if scaled else loss).backward()
        own[0].grad[0] *= found
        if unscale and scaled:
            scaler.unscale_(made)
        if scaled:
            scaler.step(made)
            scaler.update()
        elif found == 1.0:
            made.step()
        results.append(own)
    assert scaler.skipped is (found != 1.0)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_a_step_inside_of_an_open_region_is_seen_by_the_next_forward_pass() -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(8, 4), torch.randn(16, 8)
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=0.1), preamp.GradScaler("cpu", init_scale=8.0)
    losses = []
    with preamp.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            loss = layer(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
