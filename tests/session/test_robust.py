"""Rough treatment: exceptions in the middle, two sessions at once, odd models, threads."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import preamp
from preamp.errors import PolicyError, SessionError

from .toys import LEVELS, batch, loss_of, mlp, same, weights


def step(session: preamp.Session, model: nn.Module, index: int) -> preamp.StepReport:
    with session.autocast():
        loss = loss_of(model, index)
    session.backward(loss)
    report = session.step()
    session.zero_grad()
    return report


class Stumble(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        raise ZeroDivisionError


@pytest.mark.parametrize("losses", [("loss",), ("a", "b")])
@pytest.mark.parametrize("place", ["forward", "backward", "step", "between"])
@pytest.mark.parametrize("level", LEVELS)
def test_an_exception_anywhere_leaves_a_session_that_goes_on(level: str, place: str, losses: tuple[str, ...]) -> None:
    class Broken(torch.optim.SGD):
        broken = False

        def step(self, closure=None):
            if self.broken:
                raise ZeroDivisionError
            return super().step(closure)

    def train(disturbed: bool) -> list[Tensor]:
        model = mlp()
        optimizer = Broken(model.parameters(), 0.1)
        with preamp.prepare(model, optimizer, level=level, losses=losses, scale=dict.fromkeys(losses, 32.0)) as session:
            for index in range(4):
                if disturbed and index == 2:
                    with pytest.raises(ZeroDivisionError):
                        with session.autocast():
                            loss = loss_of(model, 99)
                            if place == "forward":
                                raise ZeroDivisionError
                            loss = Stumble.apply(loss) if place == "backward" else loss
                        session.backward(loss, name=losses[0])
                        session.clip_grad_norm_(1.0)
                        if place == "between":
                            raise ZeroDivisionError
                        optimizer.broken = True
                        session.step()
                    optimizer.broken = False
                    session.zero_grad()
                    assert not torch.is_autocast_enabled("cpu")
                with session.autocast():
                    loss = loss_of(model, index)
                session.backward(loss, name=losses[-1])
                session.step()
                session.zero_grad()
        return weights(model)

    assert same(train(True), train(False))


def test_two_sessions_at_once() -> None:
    models = [mlp(seed) for seed in range(2)]
    optimizers = [torch.optim.Adam(m.parameters(), 1e-2) for m in models]
    alone = []
    for model_seed, level in enumerate(("O2", "O4")):
        model = mlp(model_seed)
        with preamp.prepare(model, torch.optim.Adam(model.parameters(), 1e-2), level=level) as session:
            for index in range(4):
                step(session, model, index)
        alone.append(weights(model))
    first = preamp.prepare(models[0], optimizers[0], level="O2")
    second = preamp.prepare(models[1], optimizers[1], level="O4")
    for index in range(4):
        step(first, models[0], index)
        step(second, models[1], index)
    first.close()
    with second.autocast():
        assert (torch.randn(2, 2) @ torch.randn(2, 2)).softmax(-1).dtype is torch.float32, "the rules are still held"
    second.close()
    for model, expected in zip(models, alone, strict=True):
        assert same(weights(model), expected)


def test_two_sessions_with_different_rules_are_refused() -> None:
    model, other = mlp(0), mlp(1)
    with preamp.prepare(model, None, level="O4"):
        before = weights(other)
        with pytest.raises(PolicyError, match="whole process"):
            preamp.prepare(other, None, policy="O5; op gelu -> full")
        assert same(weights(other), before), "the refused model is as it was"
        with pytest.raises(PolicyError, match="close them first"):
            preamp.autocast.uninstall()
    with preamp.prepare(other, None, policy="O5; op gelu -> full") as session, session.autocast():
        assert F.gelu(torch.ones(2, dtype=torch.bfloat16)).dtype is torch.float32


def test_sessions_in_threads() -> None:
    expected = {}
    for level in ("O1", "O2", "O4", "O5"):
        model = mlp()
        with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level) as session:
            for index in range(5):
                step(session, model, index)
        expected[level] = weights(model)
    got: dict[str, list[Tensor]] = {}
    failures: list[BaseException] = []

    def work(level: str) -> None:
        try:
            model = mlp_of[level]
            with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level) as session:
                for index in range(5):
                    step(session, model, index)
            got[level] = weights(model)
        except BaseException as error:
            failures.append(error)

    mlp_of = {level: mlp() for level in expected}  # made here: seeds are global
    threads = [threading.Thread(target=work, args=(level,)) for level in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for level in expected:
        assert same(got[level], expected[level]), level


@pytest.mark.parametrize("level", LEVELS)
def test_odd_parameters_are_left_alone(level: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)
            self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.waves = nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False)
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
            self.register_buffer("nothing", None)
            self.register_parameter("absent", None)

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.linear(x) * self.wide.to(x.dtype)

    model = Odd()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level, scale=8.0) as session:
        assert model.wide.dtype is torch.float64
        assert model.waves.dtype is torch.complex64
        assert model.count.dtype is torch.long
        assert not step(session, model, 0).skipped
        with session.full_precision():
            model(batch(0)[0])
        assert int(model.count) == 2


@pytest.mark.parametrize("level", LEVELS)
def test_data_that_is_not_finite_never_reaches_the_weights(level: str) -> None:
    model = mlp()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level) as session:
        before = weights(model)
        for bad in (float("nan"), float("inf"), -float("inf")):
            x, y = batch(0)
            x[0, 0] = bad
            with session.autocast():
                loss = F.cross_entropy(model(x), y)
            session.backward(loss)
            assert session.step().skipped
            session.zero_grad()
        assert same(before, weights(model))


def test_a_model_without_parameters_and_a_session_without_an_optimizer() -> None:
    with preamp.prepare(nn.ReLU(), None, level="O5") as session:
        with session.autocast():
            assert session.policy.level == "O5"
        with pytest.raises(SessionError, match="without an optimizer"):
            session.step()
    model = mlp().eval()
    x = torch.randn(4, 6)
    expected = model(x)
    with preamp.prepare(model, None, level="O5") as session, torch.no_grad(), session.autocast():
        assert torch.allclose(model(x), expected, atol=0.05)


def test_lazy_parameters_are_asked_for_first() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises((PolicyError, SessionError), match=r"batch through the model|lazy"):
        preamp.prepare(model, None, level="O2")


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_two_losses_in_one_graph_and_retain_graph(level: str) -> None:
    model = mlp()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level, scale=16.0) as session:
        x, y = batch(0)
        with session.autocast():
            out = model(x)
            first, second = F.cross_entropy(out, y), out.pow(2).mean()
        session.backward(first, retain_graph=True)
        session.backward(second)
        assert not session.step().skipped


def test_reports_are_values_of_their_own() -> None:
    model = mlp()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level="O1") as session:
        reports = [step(session, model, index) for index in range(3)]
        with session.autocast():
            loss = loss_of(model, 0) * float("inf")
        session.backward(loss)
        reports.append(session.step())
        session.zero_grad()
        assert session.last_step is reports[-1]
        assert [r.index for r in reports] == [0, 1, 2, 3]
        assert [r.skipped for r in reports] == [False, False, False, True]
        assert reports[0].scale == reports[-1].scale == 65536.0
        assert "skipped=True" in repr(reports[-1])
