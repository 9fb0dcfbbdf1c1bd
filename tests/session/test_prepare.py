"""What prepare() refuses, objects that do not belong together; and odd models that it takes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import preamp
from preamp.errors import PolicyError, SessionError

from ..rows import over
from .toys import LEVELS, backward, batch, loss_of, mlp, same, step, weights


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


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("frozen", ["all", "last layer"])
def test_frozen_parameters_in_a_session_without_an_optimizer(level: str, frozen: str) -> None:
    model = mlp().eval()
    x = torch.randn(4, 6)
    expected = model(x)
    (model if frozen == "all" else model[-1]).requires_grad_(False)
    with preamp.prepare(model, None, level=level) as session:
        assert model[-1].weight.dtype is session.policy.params
        with session.autocast():
            out = model(x)
        assert torch.allclose(out.float(), expected, atol=0.05)
        if frozen == "last layer":
            with pytest.raises(SessionError, match="prepared without an optimizer"):
                out.sum().backward()


@pytest.mark.filterwarnings("ignore:.*without masters")
@pytest.mark.parametrize("level", LEVELS)
def test_inference_mode_is_left_first(level: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torch.inference_mode(), pytest.raises(SessionError, match=r"in torch\.inference_mode.*outside"):
        preamp.prepare(model, optimizer, level=level)
    with torch.inference_mode(), preamp.prepare(model, None, level=level) as session, session.autocast():
        assert loss_of(model, 0).isfinite()
    with preamp.prepare(model, optimizer, level=level) as session:
        step(session, model, 0)


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
        backward(session, model, 0, factor=float("inf"))
        reports.append(session.step())
        session.zero_grad()
        assert session.last_step is reports[-1]
        assert [r.index for r in reports] == [0, 1, 2, 3]
        assert [r.skipped for r in reports] == [False, False, False, True]
        assert reports[0].scale == reports[-1].scale == 65536.0
        assert "skipped=True" in repr(reports[-1])


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_of_another_model_is_refused(level: str) -> None:
    """A model that was made anew, or copied, after its optimizer is a classic."""
    model = mlp()
    optimizer = sgd(model)
    twin = copy.deepcopy(model)
    before = weights(twin)
    with pytest.raises(SessionError, match=r"the SGD has 6 parameters and none of them is the model's"):
        preamp.prepare(twin, optimizer, level=level)
    assert same(before, weights(twin)) and not optimizer._optimizer_step_pre_hooks
    with pytest.raises(SessionError, match=r"the SGD '1' has 6 parameters"):
        preamp.prepare([twin, mlp(1)], [sgd(twin), optimizer], level=level)
    with preamp.prepare(model, torch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.ones(1))], 0.1)):
        pass


@over(level=["O0", "O4"], kind=[torch.optim, preamp.optim])
def test_optimizers_may_have_parameters_in_common_where_gradients_are_true(level: str, kind: Any) -> None:
    """An encoder that two optimizers index, as torch does it: clipped by each, and stepped in turn or at once."""

    def optimizers(model: torch.nn.Module) -> list[Any]:
        parameters = [*model.parameters()]
        return [kind.SGD(parameters[:4], 0.1, momentum=0.9), kind.Adam(parameters[2:], 1e-2, eps=1e-4)]

    model, twin = mlp(), mlp()
    one, two = optimizers(model)
    session = preamp.prepare(model, [one, two], level=level)
    first, second = optimizers(twin)
    for index in range(6):
        backward(session, model, 0)
        loss_of(twin, 0).backward()
        for mine, theirs in ((one, first), (two, second)):
            session.clip_grad_norm_(0.05, optimizer=mine)
            torch.nn.utils.clip_grad_norm_([p for group in theirs.param_groups for p in group["params"]], 0.05)
            if index % 2:
                session.step(mine)
                theirs.step()
        if not index % 2:
            session.step()
            first.step(), second.step()
        session.zero_grad()
        twin.zero_grad()
    backward(session, model, 0)
    with pytest.raises(SessionError, match="have parameters in common"):
        session.clip_grad_norm_(0.05)
    session.close()
    bound = 1e-6 if level == "O0" else 5e-3
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=bound)


@over(
    level=["O1", "O2", "O4", "O5"],
    first=[torch.optim.SGD, preamp.optim.SGD],
    second=[torch.optim.Adam, preamp.optim.Adam],
)
def test_optimizers_with_common_parameters_step_one_after_the_other(level: str, first: Any, second: Any) -> None:
    """As InfoGAN has them: each has a backward pass of its own, and not every gradient is cleared in between."""

    def optimizers(model: torch.nn.Module) -> list[Any]:
        parameters = [*model.parameters()]
        return [first(parameters[:4], 0.1, momentum=0.9), second(parameters[2:], 1e-2, eps=1e-4)]

    model, twin = mlp(), mlp()
    own, theirs = optimizers(model), optimizers(twin)
    scale = preamp.DynamicScale(64.0, growth_interval=3) if level in ("O1", "O2") else None
    with preamp.prepare(model, own, level=level, scale=scale) as session:
        for index in range(12):
            turn = index // 2 % 2
            backward(session, model, index)
            loss_of(twin, index).backward()
            if index % 3 == 0:
                session.clip_grad_norm_(0.05, optimizer=own[turn])
                torch.nn.utils.clip_grad_norm_([p for g in theirs[turn].param_groups for p in g["params"]], 0.05)
            session.step(own[turn])
            theirs[turn].step()
            if index % 4:
                session.zero_grad(optimizer=own[turn])
                theirs[turn].zero_grad()
        with session.full_precision():
            torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=2e-2)
        if level in ("O1", "O2"):
            with pytest.raises(SessionError, match="that another optimizer has stepped by"):
                backward(session, model, 0)
                session.step(own[0])
                session.step(own[1])
            session.zero_grad()
            backward(session, model, 0)
        if level != "O4":
            for call in (session.step, session.unscale_):
                with pytest.raises(SessionError, match="have parameters in common"):
                    call()


@over(level=["O1", "O2", "O5"], kind=[torch.optim.SGD, preamp.optim.SGD])
def test_a_parameter_that_comes_into_a_second_optimizer_later(level: str, kind: Any) -> None:
    model = mlp()
    first, second = (kind(list(model.parameters())[part], lr=0.1) for part in (slice(0, 4), slice(4, None)))
    with preamp.prepare(model, [first, second], level=level) as session:
        assert not step(session, model, 0).skipped
        second.add_param_group({"params": [model[0].weight]})
        before = model[0].weight.detach().clone()
        backward(session, model, 1)
        with pytest.raises(SessionError, match="have parameters in common"):
            session.step()
        assert torch.equal(model[0].weight, before)
        assert not session.step(second).skipped and not torch.equal(model[0].weight, before)


def test_a_parameter_that_comes_into_a_second_optimizer_of_several_losses() -> None:
    model = mlp()
    parameters = list(model.parameters())
    first, second = (torch.optim.SGD(own, lr=0.1) for own in (parameters[:4], parameters[4:]))
    with preamp.prepare(model, [first, second], level="O1", losses=("a", "b")) as session:
        second.add_param_group({"params": [model[0].weight]})
        with session.autocast():
            loss = loss_of(model, 0)
        with pytest.raises(SessionError, match="two losses with scales of their own"):
            session.backward(loss, name="a")


def test_parameters_in_common_that_a_session_does_not_take() -> None:
    for options, cast in (({"losses": ("a", "b"), "level": "O1"}, False), ({"level": "O5"}, True)):
        model = torch.nn.Sequential(torch.nn.Linear(8, 4)).bfloat16() if cast else mlp()
        both = [sgd(model), torch.optim.Adam(model.parameters(), eps=1e-4)]
        with pytest.raises(SessionError, match=r"'0\.weight' is in the SGD '0' and in the Adam '1'"):
            preamp.prepare(model, both, **options)
        assert all(p.dtype is (torch.bfloat16 if cast else torch.float32) for p in model.parameters())


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_bare_module_that_only_holds_parameters(level: str) -> None:
    model = nn.Module()
    model.weights = nn.ParameterList([torch.ones(4, 4)])
    before = type(model)
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level, scale=8.0) as session:
        with session.autocast():
            loss = (model.weights[0] @ torch.ones(4, 1, dtype=model.weights[0].dtype)).float().sum()
        session.backward(loss)
        session.step()
    assert type(model) is before and model.weights[0][0, 0].item() == pytest.approx(0.9, abs=1e-3)


@pytest.mark.parametrize("level", [*LEVELS, "O5,masters=no"])
@pytest.mark.filterwarnings("ignore:.*rounds to the nearest")
def test_gradients_from_before_a_session_get_the_dtype_of_its_parameters(level: str) -> None:
    """Those that a framework has set to zero, say: where there are no masters they are 16-bit, too."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_of(model, 0).backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with preamp.prepare(model, optimizer, policy=level):
        assert {p.grad is not None and p.grad.dtype is p.dtype for p in model.parameters()} == {True}
    torch.testing.assert_close([p.grad for p in model.parameters()], wanted, rtol=0.01, atol=1e-4)


@pytest.mark.parametrize("level", LEVELS)
def test_a_parameter_that_an_optimizer_has_twice_is_refused(level: str) -> None:
    encoder, decoder = nn.Linear(6, 6), nn.Linear(6, 6)
    decoder.weight = encoder.weight
    model = nn.Sequential(encoder, decoder)
    every = [*encoder.parameters(), *decoder.parameters()]
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = torch.optim.SGD(every, 0.1)
    with pytest.raises(SessionError, match=r"has the parameter '0\.weight' twice"):
        preamp.prepare(model, optimizer, level)
    preamp.prepare(model, torch.optim.SGD(dict.fromkeys(every), 0.1), level).close()


def test_one_scale_for_two_losses_is_refused() -> None:
    model, scale = mlp(), preamp.DynamicScale()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for given in (scale, {"d": scale, "g": scale}):
        with pytest.raises(PolicyError, match="several losses"):
            preamp.prepare(model, optimizer, "O1", losses=("d", "g"), scale=given)
