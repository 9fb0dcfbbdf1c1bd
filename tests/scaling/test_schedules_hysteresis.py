"""Backoff beside torch's own update, and hysteresis beside a plain model of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp.errors import ScaleError, StateError
from preamp.scaling import DynamicScale, HysteresisScale, loss_scale

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


@settings(max_examples=60, deadline=None)
@given(flags=FLAGS, factors=FACTORS, interval=st.integers(1, 5), start=st.sampled_from([-126, -3, 16, 126]))
def test_a_hysteresis_of_one_is_backoff(flags: list[bool], factors: Any, interval: int, start: int) -> None:
    pair = (DynamicScale(2.0**start, *factors, interval), HysteresisScale(2.0**start, *factors, interval, hysteresis=1))
    for flag in flags:
        for scale in pair:
            scale.after_step(torch.tensor(float(flag)))
        assert torch.equal(pair[0].current(CPU), pair[1].current(CPU))


def test_single_bad_batches_cost_no_scale() -> None:
    """What hysteresis is for: one bad batch between two growths is skipped, and forgotten."""
    patient, eager = HysteresisScale(2.0**10, growth_interval=10), DynamicScale(2.0**10, growth_interval=10)
    for step in range(60):
        for scale in (patient, eager):
            scale.after_step(torch.tensor(float(step % 20 == 5)))
    assert float(patient.current(CPU)) > float(eager.current(CPU))


@pytest.mark.parametrize("scale", [DynamicScale(), HysteresisScale()], ids=lambda s: s.kind)
def test_no_step_waits(scale: DynamicScale) -> None:
    for _ in range(4):
        scale.after_step(torch.ones((), device=META))
        assert scale.scale(torch.ones((), device=META)).device == scale.inverse(META).device == META


def test_state_survives_a_round_trip() -> None:
    before = HysteresisScale(8.0, 4.0, 0.25, 3, hysteresis=3, min_scale=0.125, max_scale=64.0, patience=9)
    for flag in (0, 0, 1, 0, 1):
        before.after_step(torch.tensor(float(flag)))
    before.after_step(torch.tensor(0.0))
    state = before.state_dict()
    fresh = HysteresisScale()
    defaults = fresh.state_dict()
    assert all(state[key] != defaults[key] for key in state if key not in ("kind",)), (
        "a default would hide a lost field"
    )
    tensors = dict(fresh._state)
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    assert all(fresh._state[name] is tensor for name, tensor in tensors.items())  # a captured graph still sees them
    for flag in (1, 0, 0, 0, 1, 1):
        for scale in (before, fresh):
            scale.after_step(torch.tensor(float(flag)))
        assert before.state_dict() == fresh.state_dict()


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


def test_names() -> None:
    assert type(loss_scale("backoff")) is type(loss_scale("dynamic")) is DynamicScale
    assert type(loss_scale("hysteresis")) is HysteresisScale
    with pytest.raises(ScaleError, match=r"scale='windows' names no schedule.*unscaled: write 'dynamic'.*'hysteresis'"):
        loss_scale("windows")
