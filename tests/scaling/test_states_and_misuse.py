"""States, pickles, histories and misuse of loss scales: beside torch's, and strict where it is not."""

from __future__ import annotations

import copy
import inspect
import io
import math
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import preamp
from preamp.errors import ScaleCollapse, ScaleError, StateError
from preamp.scaling import DynamicScale, LossScale, NoScale, ScaleEvent, StaticScale

from ..rows import over


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def scaler(kind: type[Any], **changes: Any) -> Any:
    return kind("cpu", **{"init_scale": 2.0**10, "growth_interval": 5, **changes})


def run_some(s: Any, steps: int = 8, bad: tuple[int, ...] = (3,)) -> nn.Module:
    m = model()
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        s.scale(m(torch.ones(2, 3)).square().sum() * (math.inf if step in bad else 1.0)).backward()
        s.step(optimizer)
        s.update()
    return m


def test_it_is_torchs() -> None:
    assert issubclass(preamp.GradScaler, torch.amp.GradScaler)
    ours, torchs = (inspect.signature(kind.__init__).parameters for kind in (preamp.GradScaler, torch.amp.GradScaler))
    for name, parameter in torchs.items():
        assert ours[name].default == parameter.default and ours[name].kind == parameter.kind
    assert list(ours)[: len(torchs)] == list(torchs)


@pytest.mark.parametrize("from_kind", [preamp.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("to_kind", [preamp.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("started", [True, False])
def test_states_are_exchanged(from_kind: type[Any], to_kind: type[Any], started: bool) -> None:
    one = from_kind("cpu", 2.0**8, 3.0, 0.25, 7)
    run_some(one)
    state = one.state_dict()
    assert set(state) == {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
    assert state["_growth_tracker"] == 4 and state["scale"] == 2.0**6  # no default left
    other = to_kind("cpu")
    if started:
        run_some(other)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    other.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    assert other.state_dict() == state
    run_some(one, 5, ())
    run_some(other, 5, ())
    assert one.state_dict() == other.state_dict() and one.get_scale() == 2.0**6 * 3


def test_a_state_out_of_range_changes_nothing() -> None:
    s = scaler(preamp.GradScaler, min_scale=4.0, max_scale=2.0**12)
    run_some(s)
    before = s.state_dict()
    for wrong in (0.0, -1.0, math.nan, math.inf, 1e-40, 2.0, 2.0**13):
        with pytest.raises(ScaleError, match="scale in the state_dict"):
            s.load_state_dict({**before, "scale": wrong})
    assert s.state_dict() == before
    with pytest.raises(RuntimeError):
        s.load_state_dict({})


@pytest.mark.parametrize("started", [True, False])
def test_pickling_and_copying(started: bool) -> None:
    s = scaler(preamp.GradScaler, min_scale=2.0, max_scale=2.0**11, patience=9)
    if started:
        run_some(s)
    for twin in (pickle.loads(pickle.dumps(s)), copy.deepcopy(s)):
        assert twin.state_dict() == s.state_dict() and list(twin.history) == []
        for _ in range(8):
            run_some(twin, 1, (0,))
        assert twin.get_scale() >= 2.0
        with pytest.raises(ScaleCollapse):
            run_some(twin, 20, tuple(range(20)))


@over(fused=[False, True], unscaled=[False, True])
def test_skipped_tells_the_truth(fused: bool, unscaled: bool) -> None:
    m, s = model(), scaler(preamp.GradScaler)
    assert s.skipped is False
    optimizer = torch.optim.Adam(m.parameters(), 0.1, fused=fused)
    for bad in (False, True, True, False):
        optimizer.zero_grad()
        s.scale(m(torch.ones(2, 3)).sum() * (math.nan if bad else 1.0)).backward()
        if unscaled:
            s.unscale_(optimizer)
        s.step(optimizer)
        assert s.skipped is bad
        s.update()
        assert s.skipped is bad  # until the next step
    assert [event.skipped for event in s.history] == [False, True, True, False]


def test_history_tells_the_scale_each_step_had() -> None:
    s = scaler(preamp.GradScaler, growth_interval=2)
    run_some(s, 6, (1, 2))
    expected = [(1024.0, False), (1024.0, True), (512.0, True), (256.0, False), (256.0, False), (512.0, False)]
    assert list(s.history) == [ScaleEvent(*row) for row in expected]


def test_updating_to_a_given_scale() -> None:
    ours = scaler(preamp.GradScaler, min_scale=2.0)
    ours.scale(torch.ones(1))
    ours.update(64)  # a whole number, on which torch fails
    assert ours.get_scale() == 64.0
    for wrong in (0.0, -1.0, math.nan, math.inf, 1e-42, True):
        with pytest.raises(ScaleError, match="new_scale"):
            ours.update(wrong)
        assert ours.get_scale() == 64.0
    for value, expected in ((math.nan, 2.0), (0.0, 2.0), (math.inf, 2.0**127), (8.0, 8.0)):
        mine = torch.tensor(value)
        ours.update(mine)
        assert ours.get_scale() == expected
        assert torch.equal(mine.nan_to_num(1.5), torch.tensor(value).nan_to_num(1.5))  # the caller's stays as it is


def test_setters_check_too() -> None:
    s = preamp.GradScaler("cpu")
    for setter, wrong, right in (
        ("growth_factor", 1.0, 3.0), ("backoff_factor", 1.0, 0.25), ("growth_interval", 0, 10),
    ):  # fmt: skip
        with pytest.raises(ScaleError, match=setter):
            getattr(s, f"set_{setter}")(wrong)
        getattr(s, f"set_{setter}")(right)
        assert getattr(s, f"get_{setter}")() == right


@pytest.mark.parametrize("named", [True, False])
def test_a_collapse_names_the_parameter(named: bool) -> None:
    m, s = model(), scaler(preamp.GradScaler, patience=3)
    parameters: Any = m.named_parameters() if named else m.parameters()
    optimizer = torch.optim.SGD(parameters, 0.1)
    with pytest.raises(ScaleCollapse) as caught:
        for _ in range(5):
            optimizer.zero_grad()
            s.scale(m(torch.ones(2, 3)).sum()).backward()
            m[2].weight.grad[0, 0] = math.inf
            s.step(optimizer)
            s.update()
    error = caught.value
    assert error.skipped == 3 and error.scale == 256.0 and error.name == "loss"
    assert error.parameter == ("2.weight" if named else "param_groups[0]['params'][2] of shape (2, 4)")
    assert error.parameter in str(error) and "256" in str(error)
    s.scale(torch.ones(1))
    run_some(s, 2, (0, 1))  # the count begins anew


def test_a_scheduler_is_not_confused() -> None:
    """torch's scheduler warns when optimizer.step did not come first: a first step that is skipped looks like that."""
    m, s = model(), scaler(preamp.GradScaler)
    optimizer = torch.optim.SGD(m.parameters(), 0.1, fused=True)  # whose step is told of the scale
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for factor in (math.inf, 1.0):
            optimizer.zero_grad()
            s.scale(m(torch.ones(2, 3)).sum() * factor).backward()
            s.step(optimizer)
            s.update()
            if not s.skipped:
                schedule.step()
    assert schedule.get_last_lr() == [pytest.approx(0.01)]


@pytest.mark.parametrize("scale", [NoScale(), StaticScale(8.0), DynamicScale(8.0)], ids=lambda s: s.kind)
def test_states_that_do_not_fit(scale: LossScale) -> None:
    state = scale.state_dict()
    for other in (NoScale(), StaticScale(4.0), DynamicScale(4.0)):
        if other.kind != scale.kind:
            with pytest.raises(StateError, match=f"loss scale is '{other.kind}', this session's is '{scale.kind}'"):
                scale.load_state_dict(other.state_dict())
    with pytest.raises(StateError, match="loss scale is None"):
        scale.load_state_dict({})
    with pytest.raises(StateError, match="differs in fields: more"):
        scale.load_state_dict({**state, "more": 1})
    for key in set(state) - {"kind"}:
        with pytest.raises(StateError, match=f"differs in fields: {key}"):
            scale.load_state_dict({k: v for k, v in state.items() if k != key})
    assert scale.state_dict() == state


@pytest.mark.parametrize(
    "given",
    [
        {"init_scale": np.float32(8)}, {"init_scale": np.int64(8)}, {"init_scale": 8},
        {"init_scale": torch.tensor(8.0)},
        {"growth_factor": np.float64(4.0)}, {"growth_factor": 4}, {"backoff_factor": np.float32(0.25)},
        {"growth_interval": np.int64(2)}, {"growth_interval": np.int32(2)}, {"growth_interval": 2.0},
        {"enabled": False, "growth_factor": 1.0}, {"enabled": False, "init_scale": 0.0},
        {"enabled": False, "growth_interval": 0}, {"enabled": False, "backoff_factor": 2.0},
    ],
)  # fmt: skip
def test_numbers_that_torchs_scaler_takes(given: dict[str, Any]) -> None:
    """NumPy's, tensors, and any number where the scaler is switched off."""

    def trajectory(kind: Any) -> list[float]:
        scaler, weight = kind("cpu", **{"growth_interval": 2, **given}), torch.nn.Parameter(torch.ones(2))
        optimizer, found = torch.optim.SGD([weight], 0.1), []
        for i in range(6):
            scaler.scale((weight * (float("inf") if i == 4 else 1)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append(float(scaler.get_scale()))
        if scaler.is_enabled():
            scaler.update(4.0)
            scaler.set_growth_interval(np.int64(3))
            found += [float(scaler.get_scale()), scaler.get_growth_interval()]
        return found

    if isinstance(given.get("growth_interval"), float):
        assert preamp.GradScaler("cpu", **given).get_growth_interval() == 2  # torch's fails at its first update
    else:
        assert trajectory(preamp.GradScaler) == trajectory(torch.amp.GradScaler)


class OfMine(DynamicScale):
    """A schedule whose constructor takes other arguments."""

    def __init__(self, bits: int) -> None:
        super().__init__(2.0**bits, growth_interval=1e3, patience=7)  # type: ignore[arg-type]


def test_a_schedule_with_a_constructor_of_its_own_is_restored() -> None:
    scale, other = OfMine(4), OfMine(10)
    for found in (0.0, 1.0, 0.0):
        scale.after_step(torch.tensor(found))
    other.load_state_dict(scale.state_dict())
    assert other.state_dict() == scale.state_dict()
    assert (scale.state_dict()["scale"], scale.state_dict()["growth_interval"]) == (8.0, 1000)
