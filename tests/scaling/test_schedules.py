"""Loss scales beside torch's own update and a plain model of hysteresis; their states."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp.errors import ScaleError, StateError
from preamp.scaling import DynamicScale, HysteresisScale, LossScale, NoScale, StaticScale, loss_scale

from ..rows import over

CPU, META = torch.device("cpu"), torch.device("meta")

FLAGS = st.lists(st.booleans(), max_size=60)
FACTORS = st.sampled_from([(2.0, 0.5), (1.5, 0.25), (4.0, 0.9), (3.0, 0.3)])


@settings(max_examples=60, deadline=None)
@given(flags=FLAGS, factors=FACTORS, interval=st.integers(1, 5), start=st.integers(-20, 40))
def test_backoff_is_torchs_update(flags: list[bool], factors: Any, interval: int, start: int) -> None:
    ours = DynamicScale(2.0**start, *factors, interval)
    scale, good = torch.tensor(2.0**start), torch.tensor(0, dtype=torch.int32)
    for flag in flags:
        found = torch.tensor(float(flag))
        torch._amp_update_scale_(scale, good, found, *factors, interval)
        ours.after_step(found)
        assert torch.equal(ours.current(CPU), scale)
    assert ours.state_dict()["good_steps"] == int(good)


@settings(max_examples=100, deadline=None)
@given(flags=FLAGS, factors=FACTORS, interval=st.integers(1, 5), tolerance=st.integers(1, 4))
def test_hysteresis_follows_the_rule(flags: list[bool], factors: Any, interval: int, tolerance: int) -> None:
    growth, backoff = factors
    ours = HysteresisScale(2.0**10, growth, backoff, interval, hysteresis=tolerance, min_scale=0.5, max_scale=2.0**14)
    value, good, left = 2.0**10, 0, tolerance
    for flag in flags:
        ours.after_step(torch.tensor(float(flag)))
        if flag:
            good, left = 0, left - 1
            if left <= 0:
                value = max(0.5, float(torch.tensor(value * backoff)))
        else:
            good += 1
            if good == interval:
                value, good, left = min(2.0**14, float(torch.tensor(value * growth))), 0, tolerance
        assert float(ours.current(CPU)) == value
    state = ours.state_dict()
    assert (state["good_steps"], state["tolerated"]) == (good, min(tolerance, tolerance - left))


@pytest.mark.parametrize("scale", [DynamicScale(), HysteresisScale()], ids=lambda s: s.kind)
def test_no_step_waits(scale: DynamicScale) -> None:
    for _ in range(4):
        scale.after_step(torch.ones((), device=META))
        assert scale.scale(torch.ones((), device=META)).device == scale.inverse(META).device == META


def test_a_state_goes_into_the_tensors_that_are_there() -> None:
    before, fresh = HysteresisScale(8.0), HysteresisScale()
    before.after_step(torch.tensor(1.0))
    tensors = dict(fresh._state)
    fresh.load_state_dict(before.state_dict())
    assert all(fresh._state[name] is tensor for name, tensor in tensors.items())  # a captured graph still sees them


def test_what_is_refused() -> None:
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(ScaleError, match=r"hysteresis=.*whole number.*backs off at that many bad steps"):
            HysteresisScale(hysteresis=wrong)  # type: ignore[arg-type]
    scale = HysteresisScale()
    state = scale.state_dict()
    for key, wrong in (("tolerated", -1), ("tolerated", 0.5), ("hysteresis", 0), ("scale", math.inf)):
        with pytest.raises((ScaleError, StateError)):
            scale.load_state_dict({**state, key: wrong})
    with pytest.raises(StateError, match="'dynamic', this session's is 'hysteresis'"):
        scale.load_state_dict(DynamicScale().state_dict())
    assert scale.state_dict() == state
    assert "hysteresis=2" in repr(scale) and "init_scale=65536.0" in repr(scale)


def test_a_scale_never_leaves_the_range_where_it_works() -> None:
    scale = DynamicScale(growth_interval=1)
    for flag, end in ((1.0, 2.0**-126), (0.0, 2.0**127)):
        for _ in range(400):
            scale.after_step(torch.tensor(flag))
        assert float(scale.current(CPU)) == end
        assert 0 < float(scale.inverse(CPU)) < math.inf


@pytest.mark.parametrize("scale", [StaticScale(1000.0), DynamicScale(2.0**16)])
def test_a_half_loss_is_scaled_in_float32(scale: LossScale) -> None:
    loss = torch.tensor(2.0, dtype=torch.float16, requires_grad=True)
    scaled = scale.scale(loss)
    assert scaled.dtype is torch.float32 and torch.isfinite(scaled)
    double = scale.scale(torch.tensor(2.0, dtype=torch.float64))
    assert double.dtype is torch.float64


def test_no_scale_is_nothing() -> None:
    scale, loss = NoScale(), torch.tensor(3.0)
    assert scale.scale(loss) is loss and scale.inverse(CPU) is None
    scale.after_step(torch.ones(()))
    assert float(scale.current(CPU)) == 1.0


@pytest.mark.parametrize(
    ("before", "fresh"),
    [
        (NoScale(), NoScale()),
        (StaticScale(7.0, patience=3), StaticScale(9.0)),
        (DynamicScale(8.0, 3.0, 0.25, 11, min_scale=0.5, max_scale=64.0, patience=9), DynamicScale()),
        (
            HysteresisScale(8.0, 4.0, 0.25, 3, hysteresis=3, min_scale=0.5, max_scale=64.0, patience=9),
            HysteresisScale(),
        ),
    ],
    ids=lambda s: s.kind,
)
def test_state_survives_a_round_trip(before: LossScale, fresh: LossScale) -> None:
    for flag in (0.0, 1.0, 0.0):
        before.after_step(torch.tensor(flag))
    state = before.state_dict()
    defaults = fresh.state_dict()
    assert all(state[key] != defaults[key] for key in state if key != "kind"), "a default would hide a lost field"
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    for flag in (1.0, 0.0, 0.0, 0.0, 1.0, 1.0):
        for scale in (before, fresh):
            scale.after_step(torch.tensor(flag))
        assert fresh.state_dict() == before.state_dict()


def test_descriptions() -> None:
    assert type(loss_scale("backoff")) is type(loss_scale("dynamic")) is DynamicScale
    assert type(loss_scale("hysteresis")) is HysteresisScale
    assert float(loss_scale("128.0").current(torch.device("cpu"))) == 128 and loss_scale("1").kind == "none"
    with pytest.raises(ScaleError, match=r"scale='windows' names no schedule.*unscaled: write 'dynamic'.*'hysteresis'"):
        loss_scale("windows")
    assert isinstance(loss_scale(1.0), NoScale) and isinstance(loss_scale(1), NoScale)
    assert float(loss_scale(512).current(CPU)) == 512.0
    own = StaticScale(3.0)
    assert loss_scale(own) is own
    assert repr(own) == "StaticScale(3.0)" and "growth_interval=2000" in repr(DynamicScale())
    for bad in ("static", 0, -1.0, math.nan):
        with pytest.raises(ScaleError):
            loss_scale(bad)


@given(scales=st.lists(st.floats(2.0**-126, 2.0**127, width=32), min_size=1, max_size=20))
def test_the_inverse_follows_the_scale(scales: list[float]) -> None:
    """However the scale was changed; and it can be used wherever, if it was first asked for in inference mode."""
    scale = DynamicScale(scales[0])
    with torch.inference_mode():
        scale.inverse(CPU)
    for value in scales:
        scale._on(CPU)["scale"].fill_(value)
        for _ in range(2):
            inverse = scale.inverse(CPU)
            assert float(inverse) == float(np.float32(1 / np.float64(np.float32(value))))
    weight = torch.ones((), requires_grad=True)
    (weight * inverse).backward()
    assert weight.grad is not None and torch.equal(weight.grad, inverse)


@over(scale=[NoScale(), StaticScale(3.0), DynamicScale(1e5)], shape=[(), (1,), (1, 1)])
def test_a_backward_that_begins_with_the_scale_is_that_of_the_scaled_loss(
    scale: LossScale, shape: tuple[int, ...]
) -> None:  # fmt: skip
    for dtype in (torch.float32, torch.float64):
        grads = []
        for seeded in (True, False):
            x = torch.tensor([0.3, -1.7], dtype=dtype, requires_grad=True)
            loss = (x * x).sum().view(shape)
            if seeded:
                loss.backward(scale.seed(loss))
            else:
                scale.scale(loss).sum().backward()
            grads.append(x.grad)
        assert torch.equal(*grads)
    for dtype in (torch.float16, torch.bfloat16):  # which may not hold the scale
        assert scale.seed(torch.ones(shape, dtype=dtype)) is None


@over(kind=[DynamicScale, HysteresisScale], bound=[2147483647.0, 0.1, 3.3e7])
def test_a_scale_at_a_bound_that_float32_rounds_is_saved_and_loaded(kind: type[DynamicScale], bound: float) -> None:
    schedule = kind(bound, min_scale=bound, max_scale=bound)
    kind(bound, min_scale=bound, max_scale=bound).load_state_dict(schedule.state_dict())
