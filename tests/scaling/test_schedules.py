"""Loss scales against a plain model of the schedule; their states."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp.errors import ScaleError
from preamp.scaling import DynamicScale, HysteresisScale, LossScale, NoScale, StaticScale, loss_scale

CPU = torch.device("cpu")


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    flags=st.lists(st.booleans(), max_size=60),
    start=st.integers(-20, 40),
    growth=st.sampled_from([2.0, 1.5, 4.0]),
    backoff=st.sampled_from([0.5, 0.25, 0.9]),
    interval=st.integers(1, 5),
    bounds=st.sampled_from([(None, None), (2.0**-21, 2.0**41), (1.0, None)]),
)
def test_dynamic_scale_follows_the_rule(flags, start, growth, backoff, interval, bounds) -> None:
    if bounds[0] == 1.0:
        start = abs(start)
    scale = DynamicScale(2.0**start, growth, backoff, interval, min_scale=bounds[0], max_scale=bounds[1])
    low, high = bounds[0] or 2.0**-126, bounds[1] or 2.0**127
    value, good = torch.tensor(2.0**start), 0
    for bad in flags:
        scale.after_step(torch.tensor(float(bad)))
        if bad:
            value, good = torch.tensor(float(value) * backoff), 0  # one rounding, from float64
        else:
            good += 1
            if good == interval:
                grown = torch.tensor(float(value) * growth)
                value, good = grown if torch.isfinite(grown) else value, 0
        value = value.clamp(low, high)
        assert float(scale.current(CPU)) == float(value)
    state = scale.state_dict()
    assert (state["scale"], state["good_steps"]) == (float(value), good)


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
    ],
    ids=lambda s: s.kind,
)
def test_state_survives_a_round_trip(before: LossScale, fresh: LossScale) -> None:
    before.after_step(torch.ones(()))
    before.after_step(torch.zeros(()))
    state = before.state_dict()
    defaults = fresh.state_dict()
    assert all(state[key] != defaults[key] for key in state if key != "kind"), "a default would hide a lost field"
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    for flag in (0.0, 1.0, 0.0):
        before.after_step(torch.tensor(flag))
        fresh.after_step(torch.tensor(flag))
    assert fresh.state_dict() == before.state_dict()


def test_descriptions() -> None:
    assert isinstance(loss_scale("dynamic"), DynamicScale)
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


@pytest.mark.parametrize("scale", [NoScale(), StaticScale(3.0), DynamicScale(1e5)], ids=lambda scale: scale.kind)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
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


@pytest.mark.parametrize("kind", [DynamicScale, HysteresisScale])
@pytest.mark.parametrize("bound", [2147483647.0, 0.1, 3.3e7])
def test_a_scale_at_a_bound_that_float32_rounds_is_saved_and_loaded(kind: type[DynamicScale], bound: float) -> None:
    schedule = kind(bound, min_scale=bound, max_scale=bound)
    kind(bound, min_scale=bound, max_scale=bound).load_state_dict(schedule.state_dict())
