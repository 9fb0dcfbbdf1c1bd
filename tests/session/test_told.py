"""What a session tells: its choice of a level, what it cannot undo, what it is not to be copied with."""

from __future__ import annotations

import copy
import linecache
import pickle
import sys
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import preamp
from preamp.errors import PreampWarning, SessionError
from preamp.session import _prepare
from preamp.session._checks import check_hooks

from ..rows import over
from .toys import LEVELS, backward, loss_of, mlp


@pytest.mark.parametrize("given", [{}, {"level": "auto"}, {"policy": "auto"}])
@pytest.mark.parametrize("chosen", ["O0", "O4"])
def test_the_choice_of_auto(monkeypatch: pytest.MonkeyPatch, given: dict[str, str], chosen: str) -> None:
    monkeypatch.setattr(_prepare, "auto_level", lambda device: (chosen, "because of this machine"))
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if chosen == "O0":
        with pytest.warns(PreampWarning, match="mixed precision stays off, O0: because of this machine") as told:
            session = preamp.prepare(model, optimizer, **given)
        assert told[0].filename == __file__
    else:
        session = preamp.prepare(model, optimizer, **given)
    assert "because of this machine" in repr(session)
    session.close()


@pytest.mark.parametrize("optimizer", ["torch", "preamp", "stochastic", "float32", "stochastic in float16"])
def test_weights_without_masters_that_round_to_nearest(optimizer: str) -> None:
    model = mlp()
    kinds: dict[str, Any] = {
        "torch": lambda p: torch.optim.SGD(p, 0.1),
        "preamp": lambda p: preamp.optim.AdamW(p, 0.1),
        "stochastic": lambda p: preamp.optim.AdamW(p, 0.1, master=None, rounding="stochastic"),
        "float32": lambda p: torch.optim.SGD(p, 0.1),
        "stochastic in float16": lambda p: preamp.optim.SGD(p, 0.1, master=None, rounding="stochastic"),
    }
    policy = {"float32": "O4", "stochastic in float16": "O2,masters=no"}.get(optimizer, "O5,masters=no")
    made = kinds[optimizer](model.parameters())
    if optimizer in ("torch", "preamp", "stochastic in float16"):
        with pytest.warns(PreampWarning, match=r"rounds to the nearest.*rounding='stochastic'"):
            preamp.prepare(model, made, policy=policy).close()
    else:
        preamp.prepare(model, made, policy=policy).close()


def test_reports_are_pickled_as_values_and_sessions_are_not() -> None:
    for level in LEVELS:
        model = mlp()
        with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level) as session:
            backward(session, model, 0)
            report = session.step()
            for copied in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report), copy.copy(report)):
                assert repr(copied) == repr(report) and copied.nonfinite == report.nonfinite
            for act in (pickle.dumps, copy.deepcopy, copy.copy):
                with pytest.raises(SessionError, match=r"save state_dict\(\)"):
                    act(session)


def test_a_scaler_answers_for_the_schedule_of_its_session() -> None:
    model = mlp()
    schedule = preamp.DynamicScale(512.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    session = preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level="O1", scale=schedule)
    scaler = preamp.SessionScaler(session)
    for step in range(3):
        with session.autocast():
            loss = loss_of(model, step)
        scaler.scale(loss).backward()
        scaler.step(session.optimizers[""])
        session.zero_grad()
    found = (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
    assert found == (4.0, 0.25, 7) and scaler._get_growth_tracker() == 3 and scaler._init_scale == 512.0
    session.close()


@pytest.mark.parametrize("scale", [64.0, 1])
def test_a_scaler_of_a_session_without_a_schedule_has_no_factors(scale: float) -> None:
    model = mlp()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level="O1", scale=scale) as session:
        scaler = preamp.SessionScaler(session)
        assert scaler.get_scale() == scale
        for getter in (scaler.get_growth_factor, scaler.get_backoff_factor, scaler.get_growth_interval):
            with pytest.raises(SessionError, match="of kind"):
                getter()


# -- interrupts


def interrupted(code: str, line: int, run: Any) -> bool:
    """Run, with Ctrl-C at the n-th line that a function of preamp with this name executes."""
    left = [line]

    def trace(frame: Any, event: str, _: Any) -> Any:
        if "preamp" not in frame.f_code.co_filename or frame.f_code.co_name != code:
            return trace if event == "call" else None
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and "with " not in text:  # where no signal arrives, and a tracer does as a lock is released
            left[0] -= 1
            if left[0] == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    try:
        sys.settrace(trace)
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@over(level=["O1", "O5"], code=["__enter__", "__exit__", "_enter", "_exit", "_restore"])
def test_an_interrupt_at_any_line_of_a_region_ends_with_the_session(level: str, code: str) -> None:
    line = 0
    while True:
        line += 1
        model = nn.Linear(4, 4)
        session = preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level)

        def forward(session: preamp.Session = session, model: nn.Module = model) -> None:
            with session.autocast(), session.autocast():
                model(torch.ones(2, 4))

        was_interrupted = interrupted(code, line, forward)
        session.close()
        x = torch.ones(4, 4)
        assert (x @ x).dtype is torch.float32 and not torch.is_autocast_enabled("cpu")
        assert torch.autocast_increment_nesting() == 1
        torch.autocast_decrement_nesting()
        if not was_interrupted:
            break
    assert line > 3


@pytest.mark.parametrize("level", LEVELS)
def test_a_session_that_is_closed_inside_its_region(level: str) -> None:
    model = nn.Linear(4, 4)
    session = preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        with session.autocast(), session.autocast():
            session.close()
            assert (torch.ones(4, 4) @ torch.ones(4, 4)).dtype is torch.float32
        assert torch.autocast_increment_nesting() == 2
        torch.autocast_decrement_nesting()


# -- skips on the device


class Own(torch.optim.Optimizer):
    """Momentum with bias correction, which keeps its count and its average in one of many ways."""

    def __init__(self, params: Any, keep: str) -> None:
        super().__init__(params, {"step": 0})
        self.keep = keep
        self.own = {"count": 0}
        self.deep = SimpleNamespace(inner=SimpleNamespace(count=0))
        self.averages: dict[str, Any] = {}

    def _count(self, state: dict[str, Any]) -> Any:
        if self.keep == "attribute":
            self.own["count"] += 1
            return self.own["count"]
        if self.keep == "object":
            self.deep.inner.count += 1
            return self.deep.inner.count
        if self.keep == "state":
            state["step"] = state.get("step", 0) + 1
            return state["step"]
        if self.keep == "group":
            self.param_groups[0]["step"] += 1
            return self.param_groups[0]["step"]
        return state.setdefault("step", torch.zeros(())).add_(1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for index, p in enumerate(self.param_groups[0]["params"]):
            state, zeros = self.state[p], torch.zeros_like(p)
            if self.keep == "list":
                (average,) = state.setdefault("m", [zeros])
            elif self.keep == "deque":
                average = state.setdefault("m", {"past": deque([zeros])})["past"][0]
            elif self.keep == "attribute tensor":
                average = self.averages.setdefault(str(index), zeros)
                state.setdefault("seen", torch.ones(()))
            else:
                average = state.setdefault("m", zeros)
            assert p.grad is not None
            p.add_(average.lerp_(p.grad, 0.1) / (1 - 0.9 ** self._count(state)), alpha=-0.02)


def train(keep: str, skip: str, level: str) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    start, optimizer = model.weight.detach().clone(), Own(model.parameters(), keep)
    scale: Any = "dynamic" if level == "O5" else 1024.0
    with preamp.prepare(model, optimizer, level=level, skip=skip, scale=scale) as session:
        for step in range(8):
            with session.autocast():
                loss = model(torch.randn(16, 8)).float().square().mean() * (float("inf") if step in (3, 5) else 1)
            session.backward(loss)
            session.step()
            session.zero_grad()
    return model.weight.detach() - start


@over(level=["O1", "O2", "O5"], keep=["tensor", "list", "deque", "attribute tensor"])
def test_a_skip_on_the_device_puts_back_tensors_wherever_they_are(level: str, keep: str) -> None:
    assert torch.equal(train(keep, "device", level), train(keep, "host", level))


@pytest.mark.parametrize("keep", ["state", "group", "attribute", "object"])
def test_a_skip_on_the_device_refuses_counts_on_the_host(keep: str) -> None:
    with pytest.raises(SessionError, match=r"on the host .* became .*leave out skip='device'"):
        train(keep, "device", "O1")


# -- a process group


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("level", "hook", "wrapped"),
    [("O2", "power", "before"), ("O5", "power", "after"), ("O4", "power", "before"), ("O5", "other", "before")],
)
def test_powersgd_over_two_dtypes_is_told_before_it_hangs(level: str, hook: str, wrapped: str) -> None:
    model = mlp()
    ddp = DistributedDataParallel(model) if wrapped == "before" else None
    target = ddp or model
    session = preamp.prepare(target, torch.optim.SGD(model.parameters(), 0.1), level=level)
    ddp = ddp or DistributedDataParallel(model)
    if hook == "power":
        ddp.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    else:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    if hook == "power" and level in ("O2", "O5"):
        loss = loss_of(model, 0)
        with pytest.raises(SessionError, match=r"PowerSGD hook.*wait for each other"):
            session.backward(loss)
    else:
        check_hooks(ddp)
    session.close()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("level", "when", "wrapped"), [
    ("O2", 0, False), ("O2", 2, True), ("O4", 0, True), ("O4", 2, False), ("O5", 0, True), ("O5", 2, False),
])  # fmt: skip
def test_powersgd_is_told_as_the_next_region_begins(level: str, when: int, wrapped: bool) -> None:
    """Also around another hook, registered late, and without session.backward."""
    hook: Any = powerSGD_hook.powerSGD_hook
    model = mlp()
    session = preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level, scale=1.0)
    ddp, told = DistributedDataParallel(model), None
    for step in range(4):
        if step == when:
            given = default_hooks.fp16_compress_wrapper(hook) if wrapped else hook
            ddp.register_comm_hook(powerSGD_hook.PowerSGDState(None), given)
        try:
            with session.autocast():
                loss = loss_of(ddp, step)
        except SessionError as error:
            assert "wait for each other" in str(error)
            told = step
            break
        loss.backward()
        session.step()
        session.zero_grad()
    assert told == (None if level == "O4" else when)
    session.close()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_powersgd_that_comes_late_to_a_loop_without_regions(level: str) -> None:
    model = mlp()
    session = preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level, scale=1.0)
    ddp = DistributedDataParallel(model)
    session.backward(loss_of(ddp, 0))
    session.step()
    ddp.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    with pytest.raises(SessionError, match="wait for each other"):
        session.backward(loss_of(ddp, 1))
    session.close()


@pytest.mark.usefixtures("one_rank")
def test_gradients_of_another_stage_are_taken_as_they_come() -> None:
    """A stage of a pipeline does not run the backward passes itself, and may step its optimizers one by one."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    before = [p.detach().clone() for p in model.parameters()]
    optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in model]
    group = torch.distributed.group.WORLD
    session = preamp.prepare(model, optimizers, level="O1", scale=8.0, group=group)
    session.scale(torch.zeros(()))  # as the last stage does
    session._order.scaled_by_hand = False  # and this one does not
    for step in range(2):
        for optimizer in optimizers:
            with session.autocast():
                loss = loss_of(model, step)
            (loss * 8).backward()
            assert not session.step(optimizer).skipped
        session.zero_grad()
    session.close()
    assert not any(map(torch.equal, before, model.parameters()))
