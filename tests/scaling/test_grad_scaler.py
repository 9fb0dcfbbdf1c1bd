"""preamp.GradScaler beside torch's: the same trajectory bit for bit, and what it adds."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable

import pytest
import torch
from torch.nn import Parameter

import preamp
from preamp.errors import ScaleCollapse, ScaleError

OPTIMIZERS: dict[str, Callable[[list[Parameter]], torch.optim.Optimizer]] = {
    "SGD-foreach": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, foreach=True),
    "SGD-loop": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, foreach=False),
    "SGD-fused": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, fused=True),
    "Adam-foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "Adam-loop": lambda p: torch.optim.Adam(p, foreach=False),
    "Adam-fused": lambda p: torch.optim.Adam(p, fused=True),
    "AdamW-foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW-loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "AdamW-fused": lambda p: torch.optim.AdamW(p, fused=True),
}


def drive(kind: type[torch.amp.GradScaler], name: str, steps: int = 150):
    """Random steps with inf and nan, unscaled and clipped now and then, over two optimizers."""
    torch.manual_seed(1)
    chance = random.Random(2)
    groups = [[Parameter(torch.randn(5)), Parameter(torch.randn(3, 2))], [Parameter(torch.randn(4))]]
    optimizers = [OPTIMIZERS[name](group) for group in groups]
    scaler = kind("cpu", growth_interval=3)
    trace = []
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = sum((p * torch.randn_like(p)).sum() for group in groups for p in group)
        scaler.scale(loss).backward()
        if chance.random() < 0.25:
            victim = chance.choice(chance.choice(groups))
            victim.grad.view(-1)[0] = chance.choice([math.inf, -math.inf, math.nan])
        for optimizer, group in zip(optimizers, groups, strict=True):
            if chance.random() < 0.3:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(group, 0.5)
            scaler.step(optimizer)
        scaler.update()
        trace.append((scaler.get_scale(), [p.detach().clone() for group in groups for p in group]))
    return scaler, trace


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_random_steps_are_torchs_bit_for_bit(name: str) -> None:
    reference, expected = drive(torch.amp.GradScaler, name)
    scaler, got = drive(preamp.GradScaler, name)
    for (a, p), (b, q) in zip(expected, got, strict=True):
        assert a == b
        assert all(torch.equal(x, y) for x, y in zip(p, q, strict=True))
    assert scaler.state_dict() == reference.state_dict()
    assert 15 < sum(event.skipped for event in scaler.history) < 60


def one(scaler: torch.amp.GradScaler, value: float, fused: bool = False) -> Parameter:
    parameter = Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], 0.1, fused=fused)
    scaler.scale((parameter * value).sum()).backward()
    scaler.step(optimizer)
    return parameter


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_tells_the_truth(fused: bool) -> None:
    scaler = preamp.GradScaler("cpu")
    assert scaler.skipped is False
    for value, expected in ((1.0, False), (math.inf, True), (math.nan, True), (2.0, False)):
        before = torch.ones(3)
        after = one(scaler, value, fused)
        assert scaler.skipped is expected
        assert torch.equal(before, after.detach()) is expected
        scaler.update()
    assert [event.skipped for event in scaler.history] == [False, True, True, False]
    assert [event.scale for event in scaler.history] == [65536.0, 65536.0, 32768.0, 16384.0]


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
    scaler.scale(torch.ones(()))
    for new in (1e-40, 0.0, math.nan, math.inf, -1.0, True):
        with pytest.raises(ScaleError):
            scaler.update(new)
    scaler.update(torch.tensor(1e-40))
    assert scaler.get_scale() == 16.0
    scaler.update(torch.tensor(math.nan))
    assert scaler.get_scale() == 16.0


def test_collapse_names_the_parameter() -> None:
    good, bad = Parameter(torch.ones(2)), Parameter(torch.ones(3, 4))
    optimizer = torch.optim.SGD([good, bad], 0.1)
    scaler = preamp.GradScaler("cpu", patience=4)
    with pytest.raises(ScaleCollapse, match=r"4 updates in a row.*params'\]\[1\] of shape \(3, 4\)") as caught:
        for _ in range(9):
            optimizer.zero_grad()
            scaler.scale(good.sum() + bad.log().sum() * math.inf).backward()
            scaler.step(optimizer)
            scaler.update()
    assert caught.value.skipped == 4
    assert torch.equal(good.detach(), torch.ones(2))
    one(scaler, 1.0)
    scaler.update()


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


def test_setters_and_states_are_checked_too() -> None:
    scaler = preamp.GradScaler("cpu")
    for call in (
        lambda: scaler.set_growth_factor(1.0),
        lambda: scaler.set_backoff_factor(1.0),
        lambda: scaler.set_growth_interval(0),
        lambda: scaler.load_state_dict({**scaler.state_dict(), "scale": 0.0}),
    ):
        with pytest.raises(ScaleError):
            call()
    assert scaler.get_scale() == 65536.0
    scaler.set_growth_interval(7)
    assert scaler.get_growth_interval() == 7


def test_states_are_exchanged_with_torchs() -> None:
    ours, _ = drive(preamp.GradScaler, "SGD-loop", steps=20)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == ours.state_dict()
    back = preamp.GradScaler("cpu")
    back.load_state_dict(theirs.state_dict())
    assert back.state_dict() == ours.state_dict()
    thawed = pickle.loads(pickle.dumps(ours))
    assert thawed.state_dict() == ours.state_dict()
    one(thawed, 1.0)
    thawed.update()


def test_a_disabled_scaler_steps_through() -> None:
    scaler = preamp.GradScaler("cpu", enabled=False)
    assert torch.allclose(one(scaler, 1.0).detach(), torch.full((3,), 0.9))
    scaler.update()
    assert scaler.state_dict() == {} and not scaler.skipped and not list(scaler.history)


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
