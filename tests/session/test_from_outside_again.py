"""Passes in full precision, other optimizers, other threads, 16-bit models: right beside a session, or an error."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

import preamp
from preamp.errors import CheckpointError, SessionError

from ..rows import over

LEVELS = ("O1", "O2", "O4", "O5")
LIBRARIES = (torch.optim, preamp.optim)


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def batch(seed: int = 0) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def whole(session: preamp.Session, model: nn.Sequential) -> None:
    with session.full_precision():
        loss = model(batch()).square().mean()
    session.backward(loss)


def last_layer(session: preamp.Session, model: nn.Sequential) -> None:
    with session.autocast():
        hidden = model[1](model[0](batch()))
        with session.full_precision():
            loss = model[2](hidden.float()).square().mean()
    session.backward(loss)


def penalty(session: preamp.Session, model: nn.Sequential) -> None:
    with session.full_precision(values_only=True):
        size = torch.stack([p.square().sum() for p in model.parameters()]).sum()
    with session.autocast():
        loss = model(batch()).float().square().mean()
    session.backward(loss)
    session.backward(0.01 * size)


def one_of_two(session: preamp.Session, model: nn.Sequential) -> None:
    with session.autocast():
        session.backward(model(batch()).float().square().mean())
    with session.full_precision():
        loss = model(batch(1)).square().mean()
    session.unscale_()
    session.backward(loss)


def backward_inside(session: preamp.Session, model: nn.Sequential) -> None:
    with session.autocast():
        session.backward(model(batch()).float().square().mean())
    with session.full_precision():
        session.backward(model(batch(1)).square().mean())


def loss_from_outside(session: preamp.Session, model: nn.Sequential) -> None:
    with session.autocast():
        first, second = (model(batch(seed)).float().square().mean() for seed in (0, 1))
    session.backward(first)
    with session.full_precision():
        session.backward(second)


@pytest.mark.parametrize("run", [whole, last_layer, penalty, one_of_two, backward_inside, loss_from_outside])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("level", [*LEVELS, "O5,masters=no"])
@pytest.mark.filterwarnings("ignore:the session computes in", "ignore:SGD steps bf16 weights without masters")
def test_gradients_of_a_pass_in_full_precision_are_stepped(
    level: str, library: Any, run: Callable[[preamp.Session, nn.Sequential], None]
) -> None:
    found = {}
    for each in ("O0", level):
        model = two_layers()
        before = weights(model)
        with preamp.prepare(model, library.SGD(model.parameters(), lr=0.5), level=each) as session:
            run(session, model)
            session.step()
        found[each] = weights(model) - before
    off = (found[level] - found["O0"]).norm() / found["O0"].norm()
    assert off < (0.05 if "masters" not in level else 0.3)


def heads(level: str, library: Any, **options: Any) -> tuple[nn.Sequential, preamp.Session, Optimizer]:
    """A session of the body, and the optimizer of the head, which it does not know."""
    model = two_layers()
    session = preamp.prepare(model, library.SGD(model[0].parameters(), lr=0.1), level=level, **options)
    return model, session, library.SGD(model[2].parameters(), lr=0.1)


def pass_of(session: preamp.Session, model: nn.Module, name: str | None = None) -> None:
    with session.autocast():
        loss = model(batch()).float().square().mean()
    session.backward(loss, name=name)


@over(level=["O1", "O2"], library=LIBRARIES, first=[True, False], losses=[("loss",), ("a", "b")])
def test_an_optimizer_that_the_session_does_not_have_takes_no_scaled_gradients(
    level: str, library: Any, first: bool, losses: tuple[str, ...]
) -> None:
    model, session, own = heads(level, library, losses=losses)
    pass_of(session, model, losses[0])
    if not first:
        session.step()
    before = weights(model[2])
    with pytest.raises(SessionError, match=r"does not have: .* the loss scale.*give prepare\(\) all optimizers"):
        own.step()
    assert torch.equal(weights(model[2]), before)
    session.zero_grad()
    model[2](torch.ones(1, 8).to(model[2].weight.dtype)).float().sum().backward()
    own.step()  # of a plain backward pass
    assert not torch.equal(weights(model[2]), before)
    session.close()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_its_own_gradients_from_before_a_scaled_pass_are_true(level: str) -> None:
    """A probe of detached features, in the model."""
    model, session, own = heads(level, torch.optim)
    probe = model[2](torch.ones(1, 8).to(model[2].weight.dtype)).float().sum()
    probe.backward()
    with session.autocast():
        loss = model[0](batch()).float().square().mean()
    session.backward(loss)
    own.step()
    session.step()
    session.close()


def backward_by_session(session: preamp.Session, loss: torch.Tensor) -> None:
    session.backward(loss)


def backward_by_hand(session: preamp.Session, loss: torch.Tensor) -> None:
    session.scale(loss).backward()


BACKWARD = [backward_by_session, backward_by_hand]


@over(what=["module", "perturbation"], level=["O1", "O2"], backward=BACKWARD, library=LIBRARIES)
def test_nor_do_leaves_that_the_session_never_saw(what: str, level: str, backward: Any, library: Any) -> None:
    """Another module, or an adversarial perturbation of the inputs, that the loss reaches."""
    model, other = two_layers(), nn.Linear(8, 8)
    added = nn.Parameter(torch.zeros(16, 8))
    leaf = other.weight if what == "module" else added
    with preamp.prepare(model, library.SGD(model.parameters(), lr=0.1), level=level) as session:
        own = library.SGD([leaf], lr=0.1)
        with session.autocast():
            loss = model(other(batch()) + added).float().square().mean()
        backward(session, loss)
        before = leaf.detach().clone()
        for step in (lambda: None, session.step):
            step()
            with pytest.raises(SessionError, match=r"does not have: .* the loss scale"):
                own.step()
        assert torch.equal(leaf, before)
        assert leaf.grad is not None
        leaf.grad.div_(session.loss_scale())
        own.step()  # by hand it is right
        assert not torch.equal(leaf, before)


@over(level=["O1", "O2"], backward=BACKWARD)
def test_new_leaves_in_each_pass(level: str, backward: Any) -> None:
    """Latent codes that are fitted to a model, each batch's by an optimizer of its own."""
    model = two_layers()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level=level) as session:
        refused = []
        for _ in range(8):
            latent = batch().requires_grad_()
            own = torch.optim.SGD([latent], lr=0.1)
            with session.autocast():
                loss = model(latent).float().square().mean()
            backward(session, loss)
            try:
                own.step()
            except SessionError:
                refused.append(True)
            session.step()
            session.zero_grad()
        assert len(refused) == 8


@over(level=["O1", "O2"], order=["one by one", "both backward first"], backward=BACKWARD)
def test_a_critic_beside_the_session_steps_gradients_of_its_own_loss(level: str, order: str, backward: Any) -> None:
    """The loss of the generator reaches it as well, and what that adds is cleared."""
    generator, critic = two_layers(), nn.Linear(4, 1)
    with preamp.prepare(generator, torch.optim.SGD(generator.parameters(), lr=0.1), level=level) as session:
        own = torch.optim.SGD(critic.parameters(), lr=0.1)
        for clearing in (True, False, True):
            with session.autocast():
                loss = -critic(generator(batch()).float()).mean()
            backward(session, loss)
            if order == "one by one":
                session.step()
            own.zero_grad(set_to_none=clearing)
            critic(generator(batch()).detach().float()).mean().backward()
            if order != "one by one":
                session.step()
            before = weights(critic)
            own.step()
            assert (weights(critic) - before).abs().max() < 1.0
            session.zero_grad()


@over(level=["O4", "O5"], library=LIBRARIES)
def test_without_a_scale_it_may_step_what_nobody_else_steps(level: str, library: Any) -> None:
    model, session, own = heads(level, library)
    before = weights(model[2])
    pass_of(session, model)
    own.step()
    session.step()
    session.close()
    assert not torch.equal(weights(model[2]), before)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_nor_does_it_step_16_bit_copies(level: str) -> None:
    model = two_layers()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level=level) as session:
        pass_of(session, model)
        own = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(SessionError, match="16-bit copies of weights"):
            own.step()
        session.unscale_()
        own.step()  # now they hold their masters
        session.step()


@pytest.mark.parametrize("by_torch", [True, False])
@pytest.mark.parametrize("level", ["O0", *LEVELS])
def test_an_optimizer_around_another_steps_it(level: str, by_torch: bool) -> None:
    """Also one whose class does not call torch's `__init__`, as Lookaheads and torch's PostLocalSGDOptimizer do."""

    class Around(Optimizer):
        def __init__(self, inner: Optimizer) -> None:
            if by_torch:
                super().__init__(inner.param_groups, {})
            else:
                self.param_groups, self.state = inner.param_groups, inner.state
            self.inner = inner

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.step()

    model = two_layers()
    before = weights(model)
    with preamp.prepare(model, Around(torch.optim.SGD(model.parameters(), lr=0.1)), level=level) as session:
        pass_of(session, model)
        session.step()
    assert not torch.equal(weights(model), before)


class Lookahead(Optimizer):
    """Keeps slow weights, and states of a form of its own, as libraries have it: nothing of torch's is called."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.param_groups, self.defaults, self.taken = inner, inner.param_groups, {}, 0
        self.state = defaultdict(dict)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["slow"] = parameter.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.taken += 1
        for parameter, state in self.state.items() if self.taken % 2 == 0 else ():
            parameter.copy_(state["slow"].lerp_(parameter, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"slow": [dict(each) for each in self.state.values()], "inner": self.inner.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        for (parameter, own), saved in zip(self.state.items(), state["slow"], strict=True):
            own["slow"] = saved["slow"].to(parameter.dtype).clone()
        self.inner.load_state_dict(state["inner"])


@pytest.mark.parametrize("level", ["O0", *LEVELS])
def test_an_optimizer_that_loads_states_by_itself_gets_float32_ones(level: str, tmp_path: Path) -> None:
    model = two_layers()
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    with preamp.prepare(model, optimizer, level=level, scale=1.0) as session:
        for _ in range(3):
            pass_of(session, model)
            session.step()
            session.zero_grad()
        preamp.checkpoint.save(tmp_path / "run.pt", model=model, optimizer=optimizer, session=session)
        before = [each["slow"].clone() for each in optimizer.state.values()]
        preamp.checkpoint.load(tmp_path / "run.pt", model=model, optimizer=optimizer, session=session)
        after = [each["slow"] for each in optimizer.state.values()]
        assert all(a.dtype is torch.float32 and torch.equal(a, b) for a, b in zip(after, before, strict=True))
        assert all(s["momentum_buffer"].dtype is torch.float32 for s in optimizer.inner.state.values())
        pass_of(session, model)
        session.step()
    with pytest.raises(CheckpointError, match="does not fit the optimizer"):
        preamp.checkpoint.load(tmp_path / "run.pt", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert "load_state_dict" not in vars(optimizer)


def test_closed_sessions_look_at_no_optimizer() -> None:
    before = len(_global_optimizer_pre_hooks)
    sessions = [heads(level, torch.optim)[1] for level in LEVELS]
    assert len(_global_optimizer_pre_hooks) == before + 1
    for session in sessions:
        session.close()
    assert len(_global_optimizer_pre_hooks) == before


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_16_bit_model_of_which_a_layer_is_trained(library: Any) -> None:
    model, x = two_layers().bfloat16(), batch().bfloat16()
    model[0].requires_grad_(False)
    before = weights(model)
    optimizer = library.AdamW(model[2].parameters(), lr=1e-2)
    session = preamp.prepare(model, optimizer, level="O5")
    for _ in range(3):
        with session.autocast():
            loss = model(x).float().square().mean()
        session.backward(loss)
        session.step()
        session.zero_grad()
    with session.full_precision():
        assert model(x).dtype is torch.float32
    session.close()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and model(x).dtype is torch.bfloat16
    assert not torch.equal(weights(model), before)
    model(x).float().square().mean().backward()
    optimizer.step()


@over(level=["O2", "O5"], library=LIBRARIES, then=["step", "zero_grad", "close"])
def test_float32_data_put_into_a_parameter_that_has_a_gradient(level: str, library: Any, then: str) -> None:
    model = two_layers()
    session = preamp.prepare(model, library.SGD(model.parameters(), lr=0.0), level=level)
    pass_of(session, model)
    saved = torch.randn(8, 8)
    model[0].weight.data = saved.clone()
    getattr(session, then)()
    session.close()
    assert torch.equal(model[0].weight.detach(), saved)


@pytest.mark.parametrize("level", LEVELS)
def test_a_region_that_was_kept_is_not_entered_after_close(level: str) -> None:
    model = two_layers()
    session = preamp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level=level)
    region = session.autocast()
    session.close()
    with pytest.raises(SessionError, match="this session is closed"), region:
        pass
    assert not torch.is_autocast_enabled("cpu")


class Switching(torch.optim.SGD):
    """Exchanges weights of training and of evaluation, as schedule-free optimizers do."""

    def train(self) -> None:
        self._switch(training=True)

    def eval(self) -> None:
        self._switch(training=False)

    def _switch(self, *, training: bool) -> None:
        for group in self.param_groups:
            group["train_mode"] = training


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_optimizer_that_switches_inside_full_precision_does_not_end_it(level: str) -> None:
    model = two_layers()
    optimizer = Switching(model.parameters(), lr=0.1)
    with preamp.prepare(model, optimizer, level=level) as session:
        pass_of(session, model)
        with session.full_precision():
            optimizer.eval()
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            optimizer.train()
        assert all(p.grad is not None for p in model.parameters())
        session.step()


class Renamed(nn.Linear):
    """Reads states of a release in which its parameters had other names."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self._register_load_state_dict_pre_hook(self._rename)

    def _rename(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in ("weight", "bias"):
            state[prefix + name] = state.pop(f"{prefix}old_{name}")


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_take_states_that_a_module_renames(level: str) -> None:
    model, other = nn.Sequential(Renamed()), nn.Linear(4, 4)
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level=level):
        model.load_state_dict({f"0.old_{name}": value for name, value in other.state_dict().items()})
    assert torch.equal(model[0].weight, other.weight) and torch.equal(model[0].bias, other.bias)


def test_torch_makes_programs_by_itself_after_passes_in_full_precision() -> None:
    before = ExportedProgram.__init__
    sessions = [heads("O5", torch.optim)[1] for _ in range(2)]
    passes = [session.full_precision() for session in sessions]
    for each in passes:
        each.__enter__()
    for each in passes:  # in the order in which they were entered, as threads may
        each.__exit__(None, None, None)
    assert ExportedProgram.__init__ is before
    for session in sessions:
        session.close()


@pytest.mark.filterwarnings("ignore:AdamW. param_groups")
def test_an_optimizer_of_preamp_steps_on_after_a_session_without_masters() -> None:
    model = two_layers()
    optimizer = preamp.optim.AdamW(model.parameters(), lr=0.01)
    with preamp.prepare(model, optimizer, level="O3", scale=1.0) as session:
        pass_of(session, model)
        session.step()
        session.zero_grad()
    model(batch()).square().mean().backward()
    optimizer.step()
    assert {v.dtype for s in optimizer.state.values() for k, v in s.items() if k != "step"} == {torch.float32}


@over(level=["O2", "O5"], kept=LIBRARIES)
def test_a_pass_in_full_precision_is_refused_once_its_weights_have_been_stepped(level: str, kept: Any) -> None:
    model = two_layers()
    with preamp.prepare(model, kept.SGD(model.parameters(), lr=0.1), level=level, scale=1.0) as session:
        with session.full_precision():
            late = model(batch()).square().mean()
        pass_of(session, model)
        session.step()
        session.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            session.backward(late)


@over(level=LEVELS, alone=[True, False])
def test_inputs_of_a_backward_are_reached_in_a_pass_in_full_precision(level: str, alone: bool) -> None:
    model = two_layers()
    wanted = model[0].weight
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level=level, scale=1.0) as session:
        with session.full_precision():
            loss = model(batch()).square().mean()
        session.backward(loss, inputs=wanted if alone else [wanted])
        session.unscale_()
        assert [p.grad is None for p in model.parameters()] == [False, True, True, True]
        plain = two_layers()
        plain(batch()).square().mean().backward()
        torch.testing.assert_close(wanted.grad, plain[0].weight.grad, rtol=1e-2, atol=1e-3)


@over(level=LEVELS, made=["full", "region", "both"], asked=["full", "between"])
def test_gradients_of_a_graph_made_with_the_other_weights(level: str, made: str, asked: str) -> None:
    """`session.grad` finds masters and 16-bit weights, whichever are in their parameters as it is called."""
    model = two_layers()
    wanted = list(model.parameters())
    exact = dict(zip(wanted, torch.autograd.grad(model(batch()).square().mean(), wanted), strict=True))
    session = preamp.prepare(model, torch.optim.SGD(wanted, lr=0.1), level=level, scale=1.0)
    with session.full_precision() if made != "region" else session.autocast():
        loss = model(batch()).float().square().mean()
    if made == "both":
        with session.autocast():
            loss = loss + model(batch()).float().square().mean()
    with session.full_precision() if asked == "full" else contextlib.nullcontext():
        for parameter, gradient in zip(wanted, session.grad(loss, wanted, create_graph=False), strict=True):
            assert gradient.dtype is torch.float32 and gradient.shape == parameter.shape
            found = gradient / (2 if made == "both" else 1)
            assert (found - exact[parameter]).norm() < 0.05 * exact[parameter].norm()
    with session.autocast():
        part = model[0](batch().to(model[0].weight.dtype)).sum()
    with pytest.raises((RuntimeError, SessionError), match=r"not have been used in the graph|depend on one of"):
        session.grad(part, model[2].weight)
    session.close()


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_what_was_frozen_since_a_pass_in_full_precision_gets_no_gradient(level: str) -> None:
    model = two_layers()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level=level, scale=1.0) as session:
        with session.full_precision():
            loss = model(batch()).square().mean()
        model[0].weight.requires_grad_(False)
        session.backward(loss)
        assert model[0].weight.grad is None and model[2].weight.grad is not None


def test_a_session_that_is_lost_while_another_optimizer_steps_disturbs_nothing() -> None:
    """The collector may let go of it at any line, also while torch goes through the hooks of all optimizers."""
    other = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([other], lr=0.1)
    other.grad = torch.ones(2)
    lost: list[preamp.Session] = []

    def let_go(*_: Any) -> None:
        lost.clear()
        gc.collect()

    handle = register_optimizer_step_pre_hook(let_go)  # comes before the session's
    model = two_layers()
    lost.append(preamp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O5"))
    del model
    try:
        optimizer.step()
    finally:
        handle.remove()
    assert not lost and torch.allclose(other, torch.full_like(other, 0.9))


def test_a_lost_session_is_let_go_with_its_model_and_optimizer() -> None:
    def train(level: str, kept: Any) -> list[weakref.ref[Any]]:
        model = two_layers()
        optimizer = kept.SGD(model.parameters(), lr=0.1)
        session = preamp.prepare(model, optimizer, level=level)
        pass_of(session, model)
        session.step()
        with session.full_precision():
            model(batch())
        return [weakref.ref(each) for each in (model, optimizer, session)]

    known = {(level, kept.__name__): train(level, kept) for level in ("O0", *LEVELS) for kept in LIBRARIES}
    gc.collect()
    assert not {case: alive for case, each in known.items() if (alive := [ref() for ref in each if ref() is not None])}


@pytest.mark.parametrize("level", ["O0", *LEVELS])
def test_what_looks_at_other_optimizers_leaves_a_step_its_single_pass(level: str) -> None:
    """Hooks may read gradients, so that preamp.optim makes them true before it runs any; a session's own reads none."""
    model = two_layers()
    optimizer = preamp.optim.SGD(model.parameters(), lr=0.1)
    with preamp.prepare(model, optimizer, level=level):
        assert not optimizer.is_hooked and optimizer._step_supports_amp_scaling
        handle = register_optimizer_step_pre_hook(lambda *_: None)
        try:
            assert optimizer.is_hooked
        finally:
            handle.remove()
