"""A training step: accumulation, skipping, several losses, and what happens when it goes wrong."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import preamp
from preamp.errors import ScaleCollapse, SessionError

from ..rows import over
from .toys import LEVELS, backward, batch, loss_of, mlp, same, step, weights


@over(level=LEVELS, fused=[False, True])
def test_a_step_with_an_inf_changes_nothing_but_the_scale(level: str, fused: bool) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4, fused=fused)
    with preamp.prepare(model, optimizer, level=level) as session:
        step(session, model, 0)
        step(session, model, 1)
        before = weights(model)
        scale, skipped = session.loss_scale(), session.skipped
        moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
        counts = [float(s["step"]) for s in optimizer.state.values()]
        report = step(session, model, 2, factor=float("inf"))
        assert report.skipped and session.skipped == skipped + 1
        assert same(weights(model), before)
        assert all(torch.equal(a, s["exp_avg"]) for a, s in zip(moments, optimizer.state.values(), strict=True))
        assert counts == [float(s["step"]) for s in optimizer.state.values()]
        dynamic = session.policy.scale == "dynamic"
        assert session.loss_scale() == (scale / 2 if dynamic else scale)
        assert not step(session, model, 3).skipped
        assert not same(weights(model), before)


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_accumulation_equals_one_large_batch(level: str) -> None:
    def run(parts: int) -> list[torch.Tensor]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        with preamp.prepare(model, optimizer, level=level, scale=256.0) as session:
            x, y = batch(0, 16)
            for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
                with session.autocast():
                    loss = F.cross_entropy(model(xs), ys) / parts
                session.backward(loss, sync=False)
            session.step()
        return weights(model)

    for one, four in zip(run(1), run(4), strict=True):
        assert torch.allclose(one, four, atol=2e-2 if level in ("O4", "O5") else 2e-3)


@pytest.mark.parametrize(
    ("level", "place"),
    [
        *itertools.product(("O1", "O2", "O5"), (None, *itertools.product(("d", "g"), range(4)))),
        *itertools.product(("O0", "O4"), (None, ("d", 1), ("g", 2))),
    ],
    ids=str,
)
def test_two_models_two_optimizers_two_losses(level: str, place: tuple[str, int] | None) -> None:
    """A GAN's loop: each loss backs off alone, an inf skips the step of the optimizer it reaches, nothing else."""

    def run(level: str) -> tuple[list[torch.Tensor], dict[str, list[bool]]]:
        generator, critic = mlp(0), mlp(1)
        critic[0] = nn.Linear(3, 16)
        opt_g = torch.optim.SGD(generator.parameters(), 0.05)
        opt_d = torch.optim.SGD(critic.parameters(), 0.05)
        scales = {"d": 32.0, "g": 2.0} if level in ("O1", "O2") else {"d": 1.0, "g": 1.0}
        session = preamp.prepare({"gen": generator, "critic": critic}, [opt_g, opt_d], level=level, scale=scales)
        skips: dict[str, list[bool]] = {"d": [], "g": []}
        for index in range(4):
            x, y = batch(index)
            opt_d.zero_grad()
            with session.autocast():
                loss = F.cross_entropy(critic(generator(x).detach()), y)
                loss = loss * float("inf") if place == ("d", index) else loss
            session.backward(loss, name="d")
            skips["d"].append(session.step(opt_d).skipped)
            opt_g.zero_grad()
            with session.autocast():
                loss = -F.cross_entropy(critic(generator(x)), y)
                loss = loss * float("inf") if place == ("g", index) else loss
            session.backward(loss, name="g")
            skips["g"].append(session.step(opt_g).skipped)
        session.close()
        return weights(generator) + weights(critic), skips

    got, skips = run(level)
    expected, _ = run("O0")
    for name in ("d", "g"):
        assert skips[name] == [place == (name, index) for index in range(4)]
    tolerance = 0.0 if level == "O0" else 2e-2
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, atol=tolerance, rtol=0), float((a - b).abs().max())


def fail(_: torch.Tensor) -> None:
    raise ZeroDivisionError


def test_losses_with_scales_of_their_own_add_up_to_the_true_sum() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    reference = mlp()
    (loss_of(reference, 0) + loss_of(reference, 1)).backward()
    for level in ("O1", "O2"):
        with preamp.prepare(model, optimizer, level=level, scale={"a": 4096.0, "b": 8.0}) as session:
            for name, index in (("a", 0), ("b", 1)):
                backward(session, model, index, name=name)
            with pytest.raises(ZeroDivisionError), model[0].weight.register_hook(fail):
                backward(session, model, 2, name="b")  # fails late, and takes nothing away
            session.unscale_()
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                assert p.grad.dtype is torch.float32
                assert torch.allclose(p.grad, q.grad, atol=3e-3)
            session.zero_grad()


def test_dynamic_scales_of_two_losses_learn_apart() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with preamp.prepare(model, optimizer, level="O1", losses=("a", "b"), scale="dynamic") as session:
        start = session.loss_scale("a")
        for name, factor in (("a", 1.0), ("b", float("inf"))):
            backward(session, model, 0, factor=factor, name=name)
        assert session.step().skipped
        assert (session.loss_scale("a"), session.loss_scale("b")) == (start, start / 2)


def test_optimizers_stepped_at_different_paces_share_a_scale_correctly() -> None:
    """The slow optimizer goes on accumulating while an overflow of the fast one halves the scale."""
    fast, slow = mlp(0), mlp(1)
    opt_fast, opt_slow = torch.optim.SGD(fast.parameters(), 0.1), torch.optim.SGD(slow.parameters(), 1.0)
    reference = mlp(1)
    (loss_of(reference, 0) + loss_of(reference, 1)).backward()
    scale = preamp.DynamicScale(init_scale=256.0)
    with preamp.prepare([fast, slow], [opt_fast, opt_slow], level="O1", scale=scale) as session:
        for index in range(2):
            with session.autocast():
                loss = loss_of(slow, index) + loss_of(fast, index)
            session.backward(loss)
            if index == 0:
                fast[0].weight.grad[0, 0] = float("inf")
                assert session.step(opt_fast).skipped
                opt_fast.zero_grad()
        assert session.loss_scale() == 128.0
        session.unscale_(opt_slow)
        for p, q in zip(slow.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, atol=3e-3)


def test_collapse_names_the_first_bad_parameter_and_leaves_the_weights_alone() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scale = preamp.DynamicScale(patience=5)
    with preamp.prepare(model, optimizer, level="O1", scale=scale) as session:
        before = weights(model)
        with pytest.raises(ScaleCollapse, match=r"5 skipped steps.*0\.weight") as caught:
            for index in range(9):
                step(session, model, index, factor=float("nan"))
        assert session.steps == 5
        assert caught.value.parameter == "0.weight"
        assert caught.value.name == "loss"
        assert same(weights(model), before)
        session.zero_grad()
        assert not step(session, model, 0).skipped


def test_out_of_order_calls_are_errors_that_say_what_to_write() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    stranger = torch.optim.SGD(mlp(1).parameters(), 0.1)
    session = preamp.prepare(model, optimizer, level="O1")
    with pytest.raises(SessionError, match=r"session\.backward"):
        session.step()
    with pytest.raises(SessionError, match="not one of the session's"):
        session.step(stranger)
    with pytest.raises(SessionError, match="no loss is called 'd'"):
        session.backward(loss_of(model, 0), name="d")
    with pytest.raises(SessionError, match=r"shape \(8, 3\)"):
        session.backward(model(batch(0)[0]))
    with pytest.raises(SessionError, match="got float"):
        session.backward(1.0)
    backward(session, model, 0)
    session.step()
    session.close()
    session.close()
    with pytest.raises(SessionError, match="closed"):
        session.step()


def test_an_empty_batch_does_no_harm() -> None:
    """Cross entropy of no samples is nan, its gradients are zero: the weights survive it."""
    model = mlp()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level="O4") as session:
        before = weights(model)
        with session.autocast():
            loss = F.cross_entropy(model(torch.randn(0, 6)), torch.empty(0, dtype=torch.long))
        session.backward(loss)
        session.step()
        assert same(before, weights(model))


def test_a_backward_of_ones_own_takes_one_scale() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = preamp.prepare(model, optimizer, level="O1", scale={"a": 8.0, "b": 2.0})
    with session, pytest.raises(SessionError, match="scale of its own"):
        session.scale(session.autocast()(loss_of)(model, 0), name="a")


@over(level=["O0", "O1", "O2", "O5"], ours=[True, False])
def test_a_report_names_the_parameters_that_overflowed(level: str, ours: bool) -> None:
    """From the one reading of the step, after the gradients are gone; "" for a loss that is well."""
    model = mlp()
    optimizer = (preamp.optim.SGD if ours else torch.optim.SGD)(model.parameters(), 1e-3)
    with preamp.prepare(model, optimizer, level=level, scale=2.0) as session:
        for bad in (False, True):
            backward(session, model, 0)
            if bad:
                model[3].weight.grad[0, 0] = float("inf")
                model[0].bias.grad[1] = float("nan")
            report = session.step()
            session.zero_grad()
            assert report.skipped is bad
            assert set(report.nonfinite) == ({"0.bias", "3.weight"} if bad else set())
    assert session.last_step.nonfinite == report.nonfinite, "a report outlives its session"


def test_names_of_several_models_and_of_what_is_in_none() -> None:
    one, two, stray = mlp(), mlp(), torch.nn.Parameter(torch.ones(2))
    optimizers = [torch.optim.SGD([*one.parameters(), stray], 0.1), torch.optim.SGD(two.parameters(), 0.1)]
    with preamp.prepare({"a": one, "b": two}, optimizers, level="O4") as session:
        with session.autocast():
            loss = loss_of(one, 0) + loss_of(two, 0) + stray.sum()
        session.backward(loss)
        for p in (stray, two[0].weight):
            p.grad.view(-1)[0] = float("nan")
        assert session.step().nonfinite == ("(not in the model)", "b:0.weight")


@over(level=["O0", "O1", "O2"], scale=[preamp.scaling.DynamicScale(8.0), 8.0])
def test_a_gradient_that_is_the_scale_is_not_the_scale_itself(level: str, scale: object) -> None:
    """What backward begins with may come to rest in a parameter, which is then unscaled in place."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(1))

        def forward(self) -> torch.Tensor:
            return self.a.float() + self.b.float().view(())

    model = Sum()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.25), level=level, scale=scale) as session:
        expected = session.loss_scale()
        for _ in range(3):
            session.backward(model())
            session.unscale_()
            assert model.a.grad == 1 and model.b.grad == 1
            report = session.step()
            session.zero_grad()
            assert session.loss_scale() == report.scale == expected and report.grad_norm == pytest.approx(2**0.5)
    assert model.a == model.b == 0.25


def test_zero_grad_clears_what_no_optimizer_has_and_calls_a_model_s_own() -> None:
    class Own(nn.Linear):
        cleared = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            Own.cleared += 1
            super().zero_grad(set_to_none)

    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Sequential(nn.Linear(3, 3), nn.ReLU()), shared)
    model[1][1].register_parameter("none", None)
    own = Own(3, 3)
    optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
    with preamp.prepare([model, own], optimizer, level="O1", scale=8.0) as session:
        for set_to_none in (True, False):
            with session.autocast():
                loss = (model(torch.ones(2, 3)) + own(torch.ones(2, 3))).float().sum()
            session.backward(loss)
            assert all(p.grad is not None for m in (model, own) for p in m.parameters())
            session.zero_grad(set_to_none)
            assert all(p.grad is None if set_to_none else not p.grad.any() for p in model.parameters())
    assert Own.cleared == 2


@over(level=["O1", "O2"], who=["optimizer", "model", "by hand", "never reached"])
def test_a_step_whose_gradients_were_cleared_is_an_error_before_it(level: str, who: str) -> None:
    """Where torch's scaler raises too; the next backward pass goes on as if nothing had been."""
    model, other = mlp(), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with preamp.prepare(model, optimizer, level=level) as session:
        before = weights(model)
        with session.autocast():
            loss = loss_of(model, 0) if who != "never reached" else other(torch.ones(2, 3)).sum()
        session.backward(loss)
        if who in ("optimizer", "model"):
            {"optimizer": optimizer, "model": model}[who].zero_grad()
        for parameter in model.parameters():
            parameter.grad = None
        with pytest.raises(SessionError, match=r"finds no gradient.*after session\.step\(\)"):
            session.step()
        assert same(before, weights(model)) and session.steps == 0
        with session.autocast():
            loss = loss_of(model, 0)
        session.zero_grad()
        session.backward(loss)
        assert not session.step().skipped and session.steps == 1
        assert not same(before, weights(model))


class Whitened(torch.optim.Optimizer):
    """Steps by a matrix product, as Shampoo, SOAP and Muon do."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            grad = parameter.grad
            parameter -= torch.linalg.solve(grad @ grad.T + torch.eye(len(grad)), grad, left=True)


@over(level=["O0", "O1", "O2", "O4", "O5"], maker=["Whitened", "Muon", "Adafactor"], region=["own", "fp16", "bf16"])
def test_a_region_that_is_open_does_not_change_what_comes_after_backward(level: str, maker: str, region: str) -> None:
    def trained(inside: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16, bias=False), nn.GELU(), nn.Linear(16, 3, bias=False))
        makers: dict[str, Any] = {"Whitened": Whitened, "Muon": preamp.optim.Muon, "Adafactor": torch.optim.Adafactor}
        with preamp.prepare(model, makers[maker](model.parameters()), level=level) as session:
            opened: Any = {
                "own": session.autocast,
                "fp16": lambda: torch.autocast("cpu", torch.float16),
                "bf16": lambda: torch.autocast("cpu", torch.bfloat16),
            }
            for index in range(3):
                backward(session, model, index)
                with opened[region]() if inside else nullcontext():
                    session.clip_grad_norm_(0.5)
                    session.step()
                    session.zero_grad()
        return weights(model)

    assert same(trained(inside=True), trained(inside=False))
