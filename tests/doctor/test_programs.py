"""Models made into programs beside training, and evaluation in inference mode: left alone, and the watch goes on."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import preamp


class Net(nn.Module):
    def __init__(self, scripted: bool = False) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.inner: Any = torch.jit.script(inner) if scripted else inner
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.inner(x).relu())
        return out


def traced(model: nn.Module, x: Tensor) -> Any:
    return torch.jit.trace(model, (x,))


def exported(model: nn.Module, x: Tensor) -> Any:
    return torch.export.export(model, (x,), strict=False).graph


def operators(program: Any) -> list[str]:
    nodes = program.inlined_graph.nodes() if hasattr(program, "inlined_graph") else program.nodes
    return [node.kind() if hasattr(node, "kind") else str(node.target) for node in nodes]


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("make", [traced, exported])
def test_what_is_made_of_a_model_is_what_it_is_without_the_watch(make: Callable[..., Any], grad: bool) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.eval()
    with torch.set_grad_enabled(grad):
        wanted = operators(make(model, x))
    model.train()
    with preamp.doctor.watch(model, every=1) as seen:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).square().mean()
            model.eval()
            with torch.set_grad_enabled(grad):
                found = operators(make(model, x))
            model.train()
            assert found == wanted
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    verdict = seen.report().verdict
    assert "failed" not in verdict
    assert make is traced or "100% of the products in 16 bits" in verdict, "torch runs what it has traced, to check it"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_model_with_a_part_that_was_scripted_is_watched_and_replayed() -> None:
    torch.manual_seed(0)
    model, x = Net(scripted=True), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with preamp.doctor.watch(model) as seen:
        for step in range(3):
            loss = model(x).square().mean() * (float("nan") if step == 1 else 1.0)
            optimizer.zero_grad()
            loss.backward()
            if step != 1:
                optimizer.step()
    assert [one.code for one in seen.findings if one.severity == "error"] == ["PA201"]
    assert "failed" not in seen.report().verdict


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_scripted_model_runs_as_without_the_watch() -> None:
    torch.manual_seed(0)
    model: Any = torch.jit.script(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with preamp.doctor.watch(model) as seen:
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
    assert "failed" not in seen.report().verdict


@pytest.mark.parametrize("every", [1, 2, 3])
def test_evaluations_in_inference_mode_leave_torch_as_it_is(every: int) -> None:
    """A dispatch mode that is left inside of inference mode comes back without a handler when that ends."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 8)
    with preamp.doctor.watch(model, every=every) as seen:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            loss = model(x).square().mean()
            with torch.inference_mode():
                model(x).add_(1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.inference_mode():
                for _ in range(3):
                    model(x).bfloat16().add_(1)
            assert torch.empty(()).dim() == 0
    assert torch.empty(()).dim() == 0
    assert "failed" not in seen.report().verdict


@pytest.mark.parametrize("around", ["forward", "backward", "step", "loop", "watch"])
def test_a_dispatch_mode_of_the_scripts_sees_what_it_sees_alone(around: str) -> None:
    """It leaves by taking the uppermost mode off: that has to be its own, whenever the doctor's came."""

    def counted(part: str) -> Any:
        return counter if part == around else contextlib.nullcontext()

    def train() -> None:
        with counted("loop"):
            for _ in range(6):
                with counted("step"):
                    with counted("forward"):
                        loss = model(x.clone()).square().mean()
                    optimizer.zero_grad()
                    with counted("backward"):
                        loss.backward()
                    optimizer.step()

    found = []
    for watched in (False, True):
        torch.manual_seed(0)
        model, x, counter = Net(), torch.randn(4, 8), Seen()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with counted("watch"), preamp.doctor.watch(model, every=1) if watched else contextlib.nullcontext() as seen:
            train()
        assert seen is None or "failed" not in seen.report().verdict
        assert not _get_current_dispatch_mode_stack() and not _python_dispatch.is_in_torch_dispatch_mode()
        found.append(counter.seen)
    assert +found[0] == +found[1]


class Seen(TorchDispatchMode):
    """Counts products: the doctor reads tensors, too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += "mm" in str(func)
        return func(*args, **(kwargs or {}))


def test_a_pass_with_fake_tensors_is_left_alone() -> None:
    model, x = Net(), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with preamp.doctor.watch(model, every=1) as seen:
        for _ in range(3):
            loss = model(x).square().mean()
            with FakeTensorMode(allow_non_fake_inputs=True):
                Net()(torch.randn(4, 8))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert "failed" not in seen.report().verdict
