"""When `Session.capture` runs, captures, replays and captures anew, with graphs that only count. What real ones compute
is tested in tests/gpu."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preamp
from preamp.errors import PreampWarning, SessionError

from ..rows import over


class Graph:
    """In the place of torch.cuda.CUDAGraph."""

    replays = 0

    def replay(self) -> None:
        Graph.replays += 1


class Stream:
    """In the place of a stream of CUDA."""

    def wait_stream(self, other: object) -> None:
        pass


STREAMS: list[Stream] = []
"""On which calls ran, and graphs were captured."""


def on(stream: Stream) -> AbstractContextManager[None]:
    STREAMS.append(stream)
    return nullcontext()


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    Graph.replays = 0
    STREAMS.clear()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: on(stream))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)


class Captured:
    """A captured step, and how often what it was made of has run."""

    def __init__(self, session: preamp.Session, model: nn.Module, **options: Any) -> None:
        self.session, self.model, self.runs = session, model, 0
        device_type, session.device_type = session.device_type, "cuda"  # elsewhere it says that there are no graphs
        self.call = session.capture(self.step, **options)
        session.device_type = device_type

    def step(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.session.zero_grad()
        with self.session.autocast():
            loss = self.model(x).float().square().mean()
        self.session.backward(loss)
        self.session.step()
        return loss.detach()

    def __call__(self, times: int = 1) -> tuple[int, int]:
        """How often `times` more calls ran the function, and how often they started a graph."""
        runs, replays = self.runs, Graph.replays
        for _ in range(times):
            self.call(torch.ones(2, 4))
        return self.runs - runs, Graph.replays - replays


@contextmanager
def captured(level: str = "O2", **options: Any) -> Iterator[Captured]:
    model = nn.Linear(4, 3)
    with preamp.prepare(model, preamp.optim.AdamW(model.parameters()), level=level) as session:
        yield Captured(session, model, **options)


def test_warm_up_then_capture_then_replay() -> None:
    with captured() as step:
        assert step(3) == (3, 0)
        assert step(1) == (1, 1) and step.call.captured
        assert step(5) == (0, 5)
        assert step.session.steps == 9
        step.call.reset()
        assert step(1) == (1, 0)
        assert step(3) == (1, 3)


def test_one_stream_for_all_calls_that_run() -> None:
    """The memory of one stream is of no use to others."""
    with captured() as step:
        step(5)
        step.call.reset()
        step(3)
        assert len(STREAMS) == 6 and len(set(STREAMS)) == 1


def test_other_shapes_after_a_reset_run_as_written_before_they_are_captured() -> None:
    with captured() as step:
        step(4)
        step.call.reset()
        for size, done in ((2, False), (3, False), (3, True)):
            step.call(torch.ones(size, 4))
            assert step.call.captured is done


def test_momentum_that_waits_for_a_first_step_is_not_captured() -> None:
    """With dampening only the host can tell that the first step was skipped, and a capture may not ask."""
    model = nn.Linear(4, 3)
    optimizer = preamp.optim.SGD(model.parameters(), 0.1, momentum=0.9, dampening=0.5)
    with preamp.prepare(model, optimizer, level="O2") as session:
        step = Captured(session, model, warmup=1)
        assert step(2) == (2, 0)
        optimizer.unstarted.update(model.parameters())
        assert step(1) == (1, 0)
        optimizer.unstarted.clear()
        assert step(1) == (1, 1)


@over(level=["O0", "O1", "O2", "O5"], what=["session", "optimizer"])
def test_loaded_states_lie_elsewhere_so_the_graph_is_made_anew(level: str, what: str) -> None:
    with captured(level) as step:
        step(6)
        loaded = step.session if what == "session" else step.session.optimizers[""]
        loaded.load_state_dict(loaded.state_dict())
        # one call as written makes what the loaded state lacks: captured, every replay would make it anew
        assert step(1) == (1, 0) and not step.call.captured
        assert step(1) == (1, 1)
        assert step(3) == (0, 3)


def test_a_rate_is_a_tensor_from_the_first_call_that_schedules_write_into() -> None:
    with captured() as step:
        group = step.session.optimizers[""].param_groups[0]
        step(1)
        rate = group["lr"]
        assert isinstance(rate, Tensor) and float(rate) == pytest.approx(1e-3)
        step(3)
        torch.optim.lr_scheduler.LambdaLR(step.session.optimizers[""], lambda _: 0.5)
        assert group["lr"] is rate and float(rate) == pytest.approx(5e-4)
        assert step(2) == (0, 2)
        group["lr"] = 1e-2
        assert step(2) == (0, 2)
        assert group["lr"] is rate and float(rate) == pytest.approx(1e-2)


def test_another_tensor_for_a_rate_is_captured_anew() -> None:
    with captured() as step:
        group = step.session.optimizers[""].param_groups[0]
        step(4)
        group["lr"] = torch.tensor(0.5)
        assert step(1) == (1, 0)
        assert step(2) == (1, 2)


def test_a_loaded_state_has_rates_of_its_own_which_are_given_back_as_numbers() -> None:
    with captured() as step:
        optimizer = step.session.optimizers[""]
        step(4)
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = torch.tensor(0.25)
        optimizer.load_state_dict(state)
        assert step(1) == (1, 0)
        assert step(2) == (1, 2)
    assert optimizer.param_groups[0]["lr"] == 0.25 and isinstance(optimizer.param_groups[0]["lr"], float)


@pytest.mark.parametrize("given", [1 / 3, torch.tensor(1 / 3)])
def test_a_number_set_after_the_last_call_stays(given: float | Tensor) -> None:
    with captured() as step:
        group = step.session.optimizers[""].param_groups[0]
        group["lr"] = given
        step(4)
        group["lr"] = 0.7
    assert group["lr"] == 0.7


def test_hyper_parameters_that_change_at_each_call_are_told_once() -> None:
    with captured() as step:
        group = step.session.optimizers[""].param_groups[0]
        step(4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for decay in (0.1, 0.2):
                group["weight_decay"] = decay
                assert step(1) == (1, 0)  # captured it would be another graph at each call
            assert step(2) == (1, 2)  # a call without a change begins the count anew
            for decay in (0.3, 0.4):
                group["weight_decay"] = decay
                step(1)
        group["weight_decay"] = 0.5
        with pytest.warns(PreampWarning, match=r"weight_decay changed before each .* cycle_momentum=False"):
            step(1)
        group["weight_decay"] = 0.6
        step(1)


def test_a_closed_session_starts_no_graph() -> None:
    with captured() as step:
        step(5)
    with pytest.raises(SessionError, match="closed"):
        step(1)
    assert Graph.replays == 2
