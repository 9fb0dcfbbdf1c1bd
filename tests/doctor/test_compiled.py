"""Compiled models are looked into: the step is done again as written, and nothing of that is left or heard."""

from __future__ import annotations

import copy
import inspect
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import preamp

from ..releases import TORCH
from ._kept import Kept

log = logging.getLogger("a.script")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        print("forward")
        log.warning("forward")
        x = self.drop(self.norm(self.inner(x)))
        x = x.half().masked_fill(x > 2, -65504.0 * 0.75)  # here
        return self.last(x.clamp(-8, 8))


def train(how: str, watched: bool) -> tuple[list[str], dict[str, Tensor], Any, list[Any]]:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Net()
    called: Any = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    losses, kept = [], Kept()
    x, y = torch.randn(32, 16), torch.randint(0, 8, (32,))
    seen = preamp.doctor.watch(model, every=1, sinks=[kept]) if watched else None
    loss_of: Any = F.cross_entropy
    if how == "wrapped":
        called = torch.compile(model, backend="aot_eager")
    elif how == "method":
        model.compile(backend="aot_eager")
    else:
        loss_of = torch.compile(F.cross_entropy, backend="aot_eager")
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(called(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item().hex())
    if seen is not None:
        seen.close()
    return losses, copy.deepcopy(model.state_dict()), seen, kept.records


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's, of what a loss is given
@pytest.mark.parametrize(
    "how",
    [
        "wrapped",
        "method",
        pytest.param("loss", marks=pytest.mark.skipif(TORCH < (2, 7), reason="an assertion of torch 2.6's compiler")),
    ],
)
def test_a_compiled_step_is_judged_and_is_the_scripts_own(
    how: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    losses, state, _, _ = train(how, watched=False)
    heard, logged = capsys.readouterr().out, [one.name for one in caplog.records].count(log.name)
    caplog.clear()
    again, after, seen, records = train(how, watched=True)
    assert losses == again
    assert all(torch.equal(state[name], after[name]) for name in state)
    assert heard == capsys.readouterr().out and logged == [one.name for one in caplog.records].count(log.name)
    assert not [facts for kind, facts in records if kind == "failed"]
    (audit, *_) = [facts for kind, facts in records if kind == "audit"]
    assert audit["flops"] > 0 and audit["low"] == ["float16"]
    found = [one for one in seen.findings if one.code == "PA205"]
    lines, first = inspect.getsourcelines(Net.forward)
    assert [one.line for one in found] == [first + next(i for i, line in enumerate(lines) if "# here" in line)]
    rows = next(facts["rows"] for kind, facts in records if kind == "telemetry")
    kinds = {row["kind"] for row in rows if row["module"] == "inner"}
    wanted = {"activation", "weight", "gradient"}
    assert kinds == (wanted if how == "loss" else wanted | {"activation gradient"})


@pytest.mark.parametrize("before", [False, True], ids=["watched, then compiled", "compiled, then watched"])
@pytest.mark.parametrize("every", [1, 2, 50])
def test_a_compiled_model_stays_compiled(every: int, before: bool) -> None:
    """A dispatch mode that is on while a model is called makes it run as written, and for good."""
    ran: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        own = any("gelu" in str(node.target) for node in graph.graph.nodes)

        def run(*given: Any) -> Any:
            ran.extend([1] * own)
            return graph(*given)

        return run

    torch.compiler.reset()
    model, kept = nn.Sequential(nn.Linear(8, 8), nn.GELU()), Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called: Any = torch.compile(model, backend=backend) if before else model
    with preamp.doctor.watch(called, every=every, sinks=[kept]):
        called = called if before else torch.compile(model, backend=backend)
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = called(torch.ones(4, 8)).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                called(torch.ones(4, 8))
    assert len(ran) == 8 and not kept.of("failed")


def test_nothing_of_the_doctors_is_compiled_into_a_compiled_step(recwarn: pytest.WarningsRecorder) -> None:
    torch.compiler.reset()
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = Kept()
    with preamp.doctor.watch(model, every=1, sinks=[kept]):

        @torch.compile(backend="aot_eager")
        def step() -> Tensor:
            loss = model(torch.ones(4, 8)).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            step()
            optimizer.step()
            optimizer.zero_grad()
    assert not [str(one.message) for one in recwarn if "Dynamo" in str(one.message)]
    steps = [facts for kind, facts in kept.records if kind == "step"]
    assert len(steps) == 3 and steps[0]["loss"] > steps[2]["loss"]
    assert not kept.of("failed")
