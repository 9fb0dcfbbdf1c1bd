"""Loss scales of other trainers: the session goes on as the old run would have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from preamp.errors import CheckpointError, PreampError, ScaleError

from ..rows import check_rows
from ..session.toys import loss_of, mlp
from .runs import Run, alike

adopt = preamp.checkpoint.adopt_scale


@pytest.fixture
def run() -> Run:
    made = Run("O1")
    made.steps(0, 1)
    return made


@pytest.mark.parametrize("make", [torch.amp.GradScaler, preamp.GradScaler])
def test_a_grad_scaler_goes_on_in_the_session(make: Any, run: Run) -> None:
    """Both take the same steps from there on, the same ones bad: scales agree at every one."""
    scaler = make("cpu", init_scale=2.0**10, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def old_step(index: int, factor: float) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, index) * factor).backward()
        scaler.step(optimizer)
        scaler.update()

    for index, factor in enumerate((1.0, float("inf"), 1.0, 1.0)):
        old_step(index, factor)
    steps, skipped = run.session.steps, run.session.skipped
    adopt(run.session, scaler.state_dict())
    assert (run.session.steps, run.session.skipped) == (steps, skipped)
    for index, factor in enumerate((1.0, 1.0, 1.0, float("nan"), 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)):
        assert run.session.loss_scale() == scaler.get_scale(), index
        old_step(index, factor)
        run.step(index, factor)


def test_apex_amp_goes_on_in_the_session() -> None:
    losses = ("d", "g")
    run = Run("O2", losses=losses)
    state = {
        "loss_scaler0": {"loss_scale": 2048.0, "unskipped": 1998},
        "loss_scaler1": {"loss_scale": 512.0, "unskipped": 5000},
    }
    adopt(run.session, state)
    assert [run.session.loss_scale(name) for name in losses] == [2048.0, 512.0]
    counts = [run.session.state_dict()["losses"][name]["good_steps"] for name in losses]
    assert counts == [1998, 1999], "a count beyond the interval would never meet it"
    for name, wanted in (("d", (2048.0, 4096.0)), ("g", (1024.0, 1024.0))):
        for scale in wanted:
            with run.session.autocast():
                loss = loss_of(run.model, 0)
            run.session.backward(loss, name=name)
            run.session.step()
            run.session.zero_grad()
            assert run.session.loss_scale(name) == scale
    adopt(run.session, state["loss_scaler0"], name="g")
    assert run.session.loss_scale("g") == 2048.0
    for wrong in (
        {"loss_scaler0": state["loss_scaler0"]},
        {f"loss_scaler{i}": state["loss_scaler0"] for i in range(3)},
    ):
        with pytest.raises(CheckpointError, match="loss scalers"):
            adopt(run.session, wrong)
    with pytest.raises(CheckpointError, match="several losses"):
        adopt(run.session, state["loss_scaler0"])
    with pytest.raises(CheckpointError, match="no loss"):
        adopt(run.session, state["loss_scaler0"], name="e")


@pytest.mark.filterwarnings("ignore:FP16_Optimizer is deprecated")
def test_what_apexs_own_amp_and_fp16_optimizer_save(run: Run) -> None:
    """By way of preamp's Apex, whose states have Apex's names; and the objects that Apex itself pickled."""
    from preamp.compat.apex.fp16_utils import FP16_Optimizer

    model = nn.Linear(2, 2).half()
    old = FP16_Optimizer(torch.optim.SGD(model.parameters(), 0.1), dynamic_loss_scale=True, verbose=False)
    old.loss_scaler._loss_scale, old.loss_scaler._unskipped = 256.0, 17
    state = old.state_dict()
    adopt(run.session, state)
    own = run.session.state_dict()["losses"]["loss"]
    assert (own["scale"], own["good_steps"]) == (256.0, 17)
    for saved, wanted in (
        (SimpleNamespace(_loss_scale=128.0, _unskipped=3, dynamic=True), (128.0, 3)),
        (SimpleNamespace(cur_scale=64.0, cur_iter=9), (64.0, 0)),
    ):
        adopt(run.session, {**state, "loss_scaler": saved})
        own = run.session.state_dict()["losses"]["loss"]
        assert (own["scale"], own["good_steps"]) == wanted


@pytest.mark.parametrize("scale", ["hysteresis", 512.0, "dynamic"], ids=["hysteresis", "static", "dynamic"])
def test_every_schedule_takes_a_scale(scale: Any) -> None:
    state = torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict() | {"_growth_tracker": 7}
    run = Run("O1", scale=scale)
    run.steps(0)
    masters = run.session.state_dict()["masters"]
    adopt(run.session, state)
    assert run.session.loss_scale() == 1024.0
    assert run.session.state_dict()["losses"]["loss"].get("good_steps", 7) == 7
    assert alike(run.session.state_dict()["masters"], masters)
    run.steps(1, 2)


GOOD = {"scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 10, "_growth_tracker": 1}


UNKNOWN: list[Any] = [
    None, [], 5, "scale", {}, {"scale": 2.0}, {"state": {}, "param_groups": []}, {"loss_scaler": 1},
    {"loss_scaler0": 5}, {"loss_scaler0": {"unskipped": 1}}, {"loss_scaler0": {"loss_scale": "x", "unskipped": 0}},
    {"loss_scaler": object(), "fp32_from_fp16": []}, {**GOOD, "scale": None}, {**GOOD, "scale": float("nan")},
    {**GOOD, "scale": -1.0}, {**GOOD, "scale": 1e300}, {**GOOD, "_growth_tracker": "x"},
    {**GOOD, "_growth_tracker": -1}, {**GOOD, "growth_interval": "x"}, {**GOOD, "growth_interval": 0},
    {**GOOD, "growth_factor": 0.5}, {**GOOD, "backoff_factor": 2.0},
]  # fmt: skip


def test_unknown_kinds_are_refused_and_change_nothing(run: Run) -> None:
    before = run.state()

    def refused(state: Any) -> None:
        with pytest.raises((CheckpointError, ScaleError, PreampError)):
            adopt(run.session, state)
        assert alike(run.state(), before)

    check_rows(UNKNOWN, refused)


def test_a_level_without_a_scale_has_none_to_adopt() -> None:
    run = Run("O4")
    with pytest.raises(CheckpointError, match="not scaled at this level"):
        adopt(run.session, GOOD)
    adopt(run.session, {**GOOD, "scale": 1.0})
