"""The schedule that looks at magnitudes: what it may never do, and what it is for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp.errors import ScaleError, StateError
from preamp.scaling import DynamicScale, WindowScale, loss_scale

from .readings import CPU, META, exponent, feed, reading

AMAX = st.one_of(
    st.sampled_from([0.0, math.inf, math.nan, 65504.0, 2.0**-24]),
    st.floats(2.0**-24, 65504.0, width=32),
)
STEPS = st.lists(st.tuples(AMAX, st.integers(0, 1000), st.booleans()), max_size=40)


@settings(max_examples=80, deadline=None)
@given(steps=STEPS, start=st.integers(-126, 127), bounds=st.sampled_from([(None, None), (0.3, 3e5)]))
def test_the_scale_is_a_power_of_two_within_its_bounds(steps: Any, start: int, bounds: Any) -> None:
    low, high = bounds[0] or 2.0**-126, bounds[1] or 2.0**127
    scale = WindowScale(min(max(2.0**start, 0.5 if bounds[0] else 0), 2.0**18 if bounds[1] else math.inf),
                        min_scale=bounds[0], max_scale=bounds[1])  # fmt: skip
    for amax, subnormals, told in steps:
        scale.after_step(torch.tensor(float(not math.isfinite(amax))), reading(amax, subnormals) if told else None)
        value = float(scale.current(CPU))
        assert math.frexp(value)[0] == 0.5 and low <= value <= high
        state = scale.state_dict()
        assert 0 <= state["learned"] <= 24 and 0 <= state["subnormal"] <= 1 and len(state["limits"]) <= 10


@settings(max_examples=30, deadline=None)
@given(before=STEPS, after=STEPS)
def test_state_survives_a_round_trip_mid_run(before: Any, after: Any) -> None:
    one = WindowScale(2.0**12, 4, 1.5, 2.5, 1e-2, 50, min_scale=2.0**-40, max_scale=2.0**40, patience=7)
    for amax, subnormals, _ in before:
        one.after_step(torch.tensor(float(not math.isfinite(amax))), reading(amax, subnormals))
    two = WindowScale()
    two.load_state_dict(one.state_dict())
    assert two.state_dict() == one.state_dict()
    for amax, subnormals, told in after:
        for scale in (one, two):
            scale.after_step(torch.tensor(float(not math.isfinite(amax))), reading(amax, subnormals) if told else None)
        assert one.state_dict() == two.state_dict()


def test_every_field_of_the_state_is_restored() -> None:
    one = WindowScale(2.0**14, 4, 1.5, 2.5, 1e-2, 50, min_scale=2.0**-40, max_scale=2.0**40, patience=7)
    one.after_step(torch.tensor(0.0))  # without a reading: a good step is counted
    for _ in range(6):
        feed(one, 2.0**-4)
    one.after_step(torch.tensor(0.0))
    feed(one, 2.0**-4, hidden=2.0**30)
    one.after_step(torch.tensor(0.0), reading(1.0, 3))
    one.after_step(torch.tensor(0.0))
    state = {**one.state_dict(), "bad_steps": 2}
    fresh = WindowScale()
    defaults = fresh.state_dict()
    assert all(state[key] != defaults[key] for key in state if key != "kind"), "a default would hide a lost field"
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    same = WindowScale(window=4)
    tensors = dict(same._state)
    same.load_state_dict(state)
    assert all(same._state[name] is tensor for name, tensor in tensors.items())  # a captured graph still sees them


def test_no_step_waits_and_state_changes_in_place() -> None:
    told = [reading(amax, 5) for amax in (1.0, math.inf, math.inf, 0.0, 60000.0, 2.0**-20)]
    for device in (CPU, META):
        scale = WindowScale()
        scale.current(device)
        tensors = dict(scale._state)
        for each in [*told, None, None]:
            scale.after_step(torch.ones((), device=device), each and each.on(device))
            scale.scale(torch.ones((), device=device))
            scale.inverse(device)
        assert all(scale._state[name] is tensor for name, tensor in tensors.items())
    assert scale.needs_statistics and not DynamicScale().needs_statistics


@settings(max_examples=40, deadline=None)
@given(flags=st.lists(st.booleans(), max_size=60), interval=st.integers(1, 5))
def test_without_readings_it_is_backoff(flags: list[bool], interval: int) -> None:
    pair = (WindowScale(growth_interval=interval), DynamicScale(growth_interval=interval))
    for flag in flags:
        for scale in pair:
            scale.after_step(torch.tensor(float(flag)))
        assert float(pair[0].current(CPU)) == float(pair[1].current(CPU))
    assert WindowScale().state_dict()["kind"] == "window"


@pytest.mark.parametrize("start", range(-10, 61, 7))
@pytest.mark.parametrize("amax", [1.0, 0.3, 2.0**-9])
def test_a_bad_start_costs_few_steps(start: int, amax: float) -> None:
    scale = WindowScale(2.0**start)
    skips = sum(feed(scale, amax) for _ in range(25))
    limit = math.log2(65504 / amax)
    assert skips <= max(0, 2 + (start - limit) / 5) or start <= limit
    assert skips == 0 or start > limit
    assert limit - 2 < exponent(scale) <= limit - 0.1  # much is subnormal: no reserve


def test_it_rises_within_a_few_steps_and_only_for_a_reason() -> None:
    low = WindowScale(2.0**-4)
    for _ in range(2):
        feed(low, 1.0)
    assert exponent(low) >= 11  # 20 powers of two up to the reserve, straight
    content = WindowScale(2.0**-4)
    for _ in range(50):
        feed(content, 1.0, subnormals=0)
    assert exponent(content) == -4  # nothing is subnormal: nothing to gain


def test_it_falls_before_anything_overflows() -> None:
    scale = WindowScale(2.0**10)
    for step in range(400):
        assert not feed(scale, 2.0 ** (step / 20)), step  # drifts up by 20 powers of two
    assert 65504 / 4 < float(scale.current(CPU)) * 2.0**20 <= 65504


def test_overflows_in_activations_are_learnt_and_slowly_forgotten() -> None:
    scale = WindowScale(2.0**10, growth_interval=100)
    bad = [feed(scale, 1.0, hidden=2.0**6) for _ in range(60)]
    assert sum(bad) <= 6 and not any(bad[20:])
    assert exponent(scale) == 9  # 2**9 * 2**6 fits
    later = [feed(scale, 1.0, hidden=2.0**6) for _ in range(1000)]
    assert 5 <= sum(later) <= 20  # it tries again about once in growth_interval steps, as backoff does
    for _ in range(1500):
        feed(scale, 1.0)
    assert exponent(scale) >= 15


def test_a_spike_and_bad_data_are_survived() -> None:
    scale = WindowScale(2.0**14)
    for _ in range(30):
        feed(scale, 1.0)
    usual = exponent(scale)
    assert feed(scale, 2.0**10)
    for _ in range(5):
        feed(scale, 1.0)
    assert exponent(scale) == usual - 1
    for _ in range(5):
        assert feed(scale, math.inf)
    assert exponent(scale) < usual - 10
    for _ in range(10):
        assert not feed(scale, 1.0)
    assert exponent(scale) == usual - 2


def test_gradients_of_zero_do_not_mislead() -> None:
    scale = WindowScale(2.0**-40)
    for _ in range(50):
        scale.after_step(torch.tensor(0.0), reading(0.0, zeros=1000))
    assert exponent(scale) == 16  # perhaps all were flushed, so it rises, to where others start
    high = WindowScale(2.0**20)
    high.after_step(torch.tensor(0.0), reading(0.0, zeros=1000))
    assert exponent(high) == 20


@pytest.mark.parametrize("changes, message", [
    ({"init_scale": 1000.0}, r"init_scale=1000.0: .*powers of two.*write 512.0 or 1024.0"),
    ({"init_scale": 0.0}, "between 2"),
    ({"window": 0}, "window=0 must be a whole number of at least 1"),
    ({"window": 2.5}, "window=2.5 must be a whole number"),
    ({"headroom": -1}, r"headroom=-1 must lie in \[0, 30\): it counts powers of two"),
    ({"headroom": math.nan}, "headroom=nan must be a finite number"),
    ({"reserve": 30}, r"reserve=30 must lie in \[0, 30\)"),
    ({"tolerance": 0}, r"tolerance=0 must lie in .*: it is a share"),
    ({"tolerance": 1.0}, "tolerance=1.0 must lie in"),
    ({"growth_interval": 0}, "growth_interval=0 must be a whole number"),
    ({"max_scale": 4.0}, "outside"),
    ({"patience": 0}, "patience=0"),
])  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ScaleError, match=message):
        WindowScale(**changes)


def test_states_that_do_not_fit_change_nothing() -> None:
    scale = WindowScale()
    feed(scale, 1.0)
    state = scale.state_dict()
    for key, wrong in (
        ("scale", 3.0), ("scale", math.nan), ("good_steps", -1), ("bad_steps", 0.5), ("learned", -1.0),
        ("learned", 25.0), ("subnormal", 2.0), ("limits", 3.0), ("limits", [0.0] * 11), ("limits", [math.inf]),
        ("window", 0), ("patience", 0),
    ):  # fmt: skip
        with pytest.raises((ScaleError, StateError)):
            scale.load_state_dict({**state, key: wrong})
    with pytest.raises(StateError, match="'dynamic', this session's is 'window'"):
        scale.load_state_dict(DynamicScale().state_dict())
    assert scale.state_dict() == state
    assert isinstance(loss_scale("window"), WindowScale) and "window=10" in repr(scale)
