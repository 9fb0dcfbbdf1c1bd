"""Several GPUs in one process: a network's stages, or networks with optimizers of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preamp
from preamp.kernels import global_norm, read
from preamp.scaling import LossScale

from ..session.toys import squares
from .test_one_rank import alone, check_alike, network, trained, weights
from .training import no_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

Made = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Made] = {
    "preamp AdamW": lambda parameters: preamp.optim.AdamW(parameters, 1e-2),
    "preamp SGD": lambda parameters: preamp.optim.SGD(parameters, 1e-2, momentum=0.9),
    "LAMB": lambda parameters: preamp.optim.LAMB(parameters, 1e-2),
    "fused": lambda parameters: torch.optim.AdamW(parameters, 1e-2, fused=True),
    "capturable": lambda parameters: torch.optim.AdamW(parameters, 1e-2, capturable=True),
    "host": lambda parameters: torch.optim.SGD(parameters, 1e-2),
}


class Stages(nn.Module):
    """A network cut in two, each half on a GPU."""

    def __init__(self, first: str = "cuda:0", second: str = "cuda:1") -> None:
        super().__init__()
        self.second_device = second
        self.first, self.second = network(first)[:2], network(second)[2:]

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).to(self.second_device))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_stages(level: str) -> None:
    model = Stages()
    session = preamp.prepare(model, preamp.optim.AdamW(model.parameters(), 1e-2), level=level)
    mine = [p.to("cuda:0") for p in trained(session, model, "cuda:0")]
    check_alike(mine, alone(level, "cuda:0", preamp.optim.AdamW), exact=False)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize(("first", "second"), [
    ("preamp AdamW", "preamp SGD"), ("fused", "preamp AdamW"), ("preamp SGD", "capturable"), ("LAMB", "fused"),
    ("host", "LAMB"), ("preamp AdamW", "host"),
])  # fmt: skip
@pytest.mark.parametrize("turned", [False, True])
def test_an_optimizer_for_each(level: str, first: str, second: str, turned: bool) -> None:
    """Clipped by their common norm, skipped together, and none of what they share is waited for."""

    def run(where: str) -> tuple[list[Tensor], int, float]:
        model = Stages("cuda:0", where)
        pair = [OPTIMIZERS[first](model.first.parameters()), OPTIMIZERS[second](model.second.parameters())]
        waits = "host" in (first, second)
        with preamp.prepare(model, pair[::-1] if turned else pair, level=level) as session:
            for step in range(10):
                x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
                x[0, 0] = torch.inf if step in (3, 8) else x[0, 0]
                x = x.to("cuda:0")
                squares(session, model, x)
                with no_waiting() if step > 4 and not waits else contextlib.nullcontext():
                    norm = session.clip_grad_norm_(0.5)
                    session.step()
                    session.zero_grad()
            session.close()
            return [p.to("cuda:0") for p in weights(model)], session.skipped, float(norm)

    mine, theirs = run("cuda:1"), run("cuda:0")
    check_alike(mine[0], theirs[0], exact=False)
    assert mine[1] == theirs[1] == 2
    assert mine[2] == pytest.approx(theirs[2], rel=1e-2)


@pytest.mark.parametrize("scale", ["dynamic", "hysteresis"])
def test_a_loss_for_each(scale: str) -> None:
    """Two losses with scales of their own: one overflows now and then, and the other's scale knows nothing of it."""

    def run(where: str) -> tuple[list[Tensor], dict[str, Any]]:
        kinds = {"hysteresis": preamp.HysteresisScale, "dynamic": preamp.DynamicScale}
        scales: dict[str, float | str | LossScale] = {name: kinds[scale](2.0**12) for name in ("near", "far")}
        models = {"near": network("cuda:0"), "far": network(where)}
        optimizers = {name: OPTIMIZERS["preamp AdamW"](each.parameters()) for name, each in models.items()}
        session = preamp.prepare(models, optimizers, level="O2", losses=("near", "far"), scale=scales)
        for step in range(8):
            for name, model in models.items():
                x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
                x[0, 0] = torch.inf if step in (2, 5) and name == "far" else x[0, 0]
                squares(session, model, x.to(next(model.parameters()).device), name=name)
            session.clip_grad_norm_(0.5)
            session.step()
            session.zero_grad()
        told = session.state_dict()["losses"]
        session.close()
        return [p.to("cuda:0") for model in models.values() for p in weights(model)], told

    mine, theirs = run("cuda:1"), run("cuda:0")
    check_alike(mine[0], theirs[0], exact=False)
    assert mine[1] == theirs[1]


def test_gradients_that_a_session_hands_out() -> None:
    model = Stages()
    optimizer = OPTIMIZERS["preamp AdamW"](model.parameters())
    with preamp.prepare(model, optimizer, level="O1", scale=2.0**10) as session:
        with session.autocast():
            loss = model(torch.ones(4, 16, device="cuda:0")).float().square().mean()
        wanted = [model.first[0].weight, model.second[1].weight]
        for parameter, gradient in zip(wanted, session.grad(loss, wanted), strict=True):
            assert gradient.device == parameter.device and gradient.dtype is torch.float32
            assert 0 < float(gradient.detach().abs().max()) < 10


@pytest.mark.parametrize("schedule", ["backoff", "hysteresis"])
def test_the_scaler(schedule: str) -> None:
    """One optimizer of both GPUs; then one each, in turns, so that the flag comes from another GPU every time."""

    def run(where: str, alternate: bool) -> tuple[list[Tensor], dict[str, Any]]:
        model = Stages("cuda:0", where)
        one = [OPTIMIZERS["preamp AdamW"](model.parameters())]
        two = [OPTIMIZERS["preamp AdamW"](part.parameters()) for part in (model.first, model.second)]
        optimizers = two if alternate else one
        scaler = preamp.GradScaler("cuda", 2.0**14, schedule=schedule)
        for step in range(10):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            x[0, 0] = torch.inf if step in (3, 8) else x[0, 0]
            with torch.autocast("cuda", torch.float16):
                loss = model(x.to("cuda:0")).float().square().mean()
            scaler.scale(loss).backward()
            optimizer = optimizers[step % len(optimizers)]
            if step % 3 == 0:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad()
        return [p.to("cuda:0") for p in weights(model)], scaler.state_dict()

    for alternate in (False, True):
        mine, theirs = run("cuda:1", alternate), run("cuda:0", alternate)
        check_alike(mine[0], theirs[0], exact=False)
        assert mine[1] == theirs[1]


def test_no_graph_is_made_of_several() -> None:
    """Its kernels would run on one, and the others' values be those of the capture."""
    model = Stages()
    with (
        preamp.prepare(model, OPTIMIZERS["preamp AdamW"](model.parameters()), level="O1") as session,
        pytest.raises(preamp.errors.SessionError, match=r"cuda:0 and cuda:1.*graph"),
    ):
        session.capture(lambda x: session.backward(model(x)))


@pytest.mark.parametrize("order", ["001110", "0101", "1", "0110100"])
def test_gradients_are_read_in_their_order(order: str) -> None:
    for bad in range(len(order)):
        gradients = [torch.full((3,), float(i + 1), device=f"cuda:{place}") for i, place in enumerate(order)]
        gradients[bad][1] = torch.nan
        for home in (None, torch.device("cuda:0"), torch.device("cuda:1")):
            with no_waiting():
                reading = read(gradients, device=home)
                norm = global_norm(gradients, device=home)
            assert reading.nonfinite.tolist() == [i == bad for i in range(len(order))]
            assert reading.nonfinite.device == norm.device == (home or gradients[0].device)
            assert float(reading.found) == 1
