"""Gradients that are released: stepped and freed as they come, beside a session that steps them at the end."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

import preamp
from preamp.errors import OptimizerError, PolicyError, ScaleCollapse, SessionError
from preamp.optim import LAMB, SGD, Adagrad, AdamW, Lion

from ..releases import TORCH
from ..rows import over
from .toys import loss_of, mlp, same, weights

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda p: AdamW(p, 1e-2, eps=1e-4),
    "SGD": lambda p: SGD(p, 0.05, momentum=0.9, weight_decay=0.1),
    "Lion": lambda p: Lion(p, 1e-3),
    "Adagrad": lambda p: Adagrad(p, 1e-2),
}
SPLIT: dict[str, Callable[[Any], Any]] = {
    "split": lambda p: AdamW(p, 1e-2, eps=1e-4, master="split"),
}
CHANCE: dict[str, Callable[[Any], Any]] = {
    "split24": lambda p: AdamW(p, 1e-2, eps=1e-4, master="split24"),
    "8bit": lambda p: AdamW(p, 1e-2, eps=1e-4, states="8bit"),
}


@pytest.fixture
def prepare() -> Iterator[Callable[..., preamp.Session]]:
    """`preamp.prepare` with gradients released, unless said otherwise; sessions are closed after the test."""
    made: list[preamp.Session] = []

    def prepared(model: nn.Module, optimizer: Any, level: str, release: bool = True) -> preamp.Session:
        made.append(preamp.prepare(model, optimizer, level=level, release_gradients=release))
        return made[-1]

    yield prepared
    for session in made:
        session.close()


def step(session: preamp.Session, model: nn.Module, index: int) -> preamp.StepReport:
    with session.autocast():
        loss = loss_of(model, index)
    session.backward(loss)
    return session.step()


def trained(make: Callable[[Any], Any], level: str, release: bool, steps: int = 8) -> tuple[list[Tensor], list[float]]:
    model = mlp()
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    norms = []
    with preamp.prepare(model, optimizer, level=level, release_gradients=release) as session:
        for index in range(steps):
            report = step(session, model, index)
            assert not report.skipped and (not release or all(p.grad is None for p in model.parameters()))
            norms.append(report.grad_norm)
            schedule.step()
            session.zero_grad()
    return weights(model), norms


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler")
@pytest.mark.parametrize(
    ("level", "name"), [*((level, name) for level in ("O0", "O4", "O5") for name in OPTIMIZERS), ("O5", "split")]
)
def test_the_same_training(level: str, name: str) -> None:
    make = {**OPTIMIZERS, **SPLIT}[name]
    (mine, norms), (theirs, wanted) = trained(make, level, True), trained(make, level, False)
    assert same(mine, theirs) and norms == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", CHANCE)
def test_nearly_the_same_training_by_chance(name: str) -> None:
    (mine, _), (theirs, _) = trained(CHANCE[name], "O5", True), trained(CHANCE[name], "O5", False)
    assert all(torch.allclose(a, b, atol=2e-2) for a, b in zip(mine, theirs, strict=True))


def test_at_most_one_gradient_is_held_and_the_bytes_are_five() -> None:
    """Weight 2, 8 bits more 1, moments in 8 bits 2.03; counted on the tensors, and while gradients come."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6)))
    optimizer = AdamW(model.parameters(), 1e-3, eps=1e-4, master="split24", states="8bit")
    held: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: held.append(sum(p.grad is not None for p in model.parameters()))
        )
    with preamp.prepare(model, optimizer, level="O5", release_gradients=True) as session:
        for _ in range(2):
            session.backward(model(torch.randn(4, 512)).float().square().mean())
            session.step()
        memory = session.memory()
        assert held == [1] * 12
        assert memory.bytes_of("gradients") == 0
        assert round(memory.total / memory.parameters, 2) == 5.03


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_a_gradient_that_is_not_finite_skips_its_own_parameter(
    prepare: Callable[..., preamp.Session], level: str
) -> None:
    model = mlp()
    session = prepare(model, AdamW(model.parameters(), 1e-2, eps=1e-4), level)
    step(session, model, 0)
    before = weights(model)
    hook = model[0].weight.register_hook(lambda gradient: gradient * float("nan"))
    report = step(session, model, 1)
    hook.remove()
    assert report.skipped and report.nonfinite == ("0.weight",) and session.skipped == 1
    after = dict(
        zip((name for name, _ in model.named_parameters()), zip(before, weights(model), strict=True), strict=True)
    )
    assert [name for name, (old, new) in after.items() if torch.equal(old, new)] == ["0.weight"]
    assert not step(session, model, 2).skipped


def test_a_long_row_of_skips_ends_training(prepare: Callable[..., preamp.Session]) -> None:
    model = mlp()
    session = prepare(model, SGD(model.parameters(), 0.1), "O5")
    with pytest.raises(ScaleCollapse), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index in range(200):
            session.backward(loss_of(model, index) * float("nan"))
            session.step()


REFUSED: dict[str, tuple[str, Callable[[Any], Any], dict[str, Any]]] = {
    "a scale": ("no scale", lambda p: AdamW(p), {"level": "O2"}),
    "a scale in regions": ("no scale", lambda p: AdamW(p), {"level": "O1"}),
    "losses": ("several losses", lambda p: AdamW(p), {"level": "O5", "losses": ("a", "b")}),
    "torch's": ("steps all of them", lambda p: torch.optim.AdamW(p), {"level": "O5"}),
    "LAMB": ("all gradients at once", lambda p: LAMB(p), {"level": "O5"}),
    "none": ("the optimizer", lambda p: None, {"level": "O5"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_at_prepare(name: str) -> None:
    says, make, arguments = REFUSED[name]
    model = mlp()
    before = weights(model)
    with pytest.raises((SessionError, PolicyError), match=says):
        preamp.prepare(model, make(model.parameters()), release_gradients=True, **arguments)
    assert same(before, weights(model)) and {p.dtype for p in model.parameters()} == {torch.float32}


def test_gradients_from_before_and_shared_parameters_are_refused() -> None:
    model = mlp()
    loss_of(model, 0).backward()
    with pytest.raises(SessionError, match="zero_grad"):
        preamp.prepare(model, AdamW(model.parameters()), level="O5", release_gradients=True)
    model.zero_grad()
    both = [AdamW(model.parameters()), SGD(model[0].parameters(), 0.1)]
    with pytest.raises(SessionError, match=r"0\.weight"):
        preamp.prepare(model, both, level="O4", release_gradients=True)


@over(
    call=[
        lambda s, o: s.unscale_(), lambda s, o: s.clip_grad_norm_(1.0), lambda s, o: s.clip_grad_value_(1.0),
        lambda s, o: s.backward(torch.ones((), requires_grad=True), sync=False), lambda s, o: s.capture(print),
    ]
)  # fmt: skip
def test_calls_that_need_all_gradients_are_refused(
    prepare: Callable[..., preamp.Session], call: Callable[[preamp.Session, Any], Any]
) -> None:
    model = mlp()
    optimizer = AdamW(model.parameters(), 1e-2, eps=1e-4)
    session = prepare(model, optimizer, "O5")
    session.backward(loss_of(model, 0))
    with pytest.raises(SessionError, match="release_gradients"):
        call(session, optimizer)
    assert not session.step().skipped


@pytest.mark.parametrize("how", ["session", "plain"])
def test_accumulation_is_refused_and_nothing_is_stepped_twice(prepare: Callable[..., preamp.Session], how: str) -> None:
    model = mlp()
    session = prepare(model, SGD(model.parameters(), 0.1), "O5")
    session.backward(loss_of(model, 0))
    before = weights(model)
    again = loss_of(model, 1)
    with pytest.raises(SessionError, match="cannot be accumulated"):
        session.backward(again) if how == "session" else again.backward()
    assert same(before, weights(model))
    model.zero_grad()
    session.step()
    assert not step(session, model, 2).skipped


def test_a_backward_of_the_users_own_is_taken(prepare: Callable[..., preamp.Session]) -> None:
    ends = []
    for own in (False, True):
        model = mlp()
        session = prepare(model, SGD(model.parameters(), 0.1), "O5")
        for index in range(3):
            loss = loss_of(model, index)
            loss.backward() if own else session.backward(loss)
            session.step()
        ends.append(weights(model))
        session.close()
    assert same(*ends)
    with pytest.raises(SessionError, match="closed"):
        session.step()


def test_a_step_without_a_backward_pass_is_refused(prepare: Callable[..., preamp.Session]) -> None:
    model = mlp()
    session = prepare(model, SGD(model.parameters(), 0.1), "O5")
    with pytest.raises(SessionError, match=r"without session\.backward"):
        session.step()


def test_several_optimizers_step_together(prepare: Callable[..., preamp.Session]) -> None:
    ends = []
    for release in (False, True):
        model = mlp()
        one, two = AdamW(model[0].parameters(), 1e-2, eps=1e-4), SGD(model[-1].parameters(), 0.1)
        session = prepare(model, [one, two], "O5", release)
        for index in range(4):
            session.backward(loss_of(model, index))
            if release:
                with pytest.raises(SessionError, match="one of several"):
                    session.step(one)
            session.step()
            session.zero_grad()
        session.close()
        ends.append(weights(model))
    assert same(*ends)


class Tied(nn.Module):
    """One weight in two places, one block recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda y: self.inner(y).tanh(), x, use_reentrant=False)
        return self.last(x)


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_tied_weights_and_recomputed_blocks(level: str) -> None:
    ends = []
    for release in (False, True):
        torch.manual_seed(0)
        model = Tied()
        session = preamp.prepare(
            model, AdamW(model.parameters(), 1e-2, eps=1e-4), level=level, release_gradients=release
        )
        for index in range(4):
            torch.manual_seed(index)
            with session.autocast():
                loss = model(torch.randn(4, 6)).float().square().mean()
            session.backward(loss)
            session.step()
            session.zero_grad()
        session.close()
        ends.append(weights(model))
    assert same(*ends)


@pytest.mark.parametrize("how", ["unfrozen", "added"])
def test_a_parameter_that_joins_later_is_stepped_and_released(prepare: Callable[..., preamp.Session], how: str) -> None:
    ends = []
    for release in (False, True):
        model = mlp()
        model[0].requires_grad_(False)
        optimizer = SGD(model.parameters() if how == "unfrozen" else model[-1].parameters(), 0.1)
        session = prepare(model, optimizer, "O5", release)
        for index in range(4):
            if index == 2:
                model[0].requires_grad_(True)
                if how == "added":
                    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})
            with session.autocast():
                loss = loss_of(model, index)
            session.backward(loss)
            session.step()
            owned = [p for group in optimizer.param_groups for p in group["params"]]
            assert not release or all(p.grad is None for p in owned)
            session.zero_grad()
        session.close()
        ends.append(weights(model))
    assert same(*ends)


def test_a_hook_clips_single_gradients_and_groups_have_their_rates(prepare: Callable[..., preamp.Session]) -> None:
    ends = []
    for release in (False, True):
        model = mlp()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        groups = [{"params": list(model[0].parameters()), "lr": 0.5}, {"params": list(model[-1].parameters())}]
        session = prepare(model, SGD(groups, 0.1, weight_decay=0.1), "O4", release)
        for index in range(3):
            step(session, model, index)
            session.zero_grad()
        session.close()
        ends.append(weights(model))
    assert same(*ends)


def test_a_resumed_run_goes_on_bit_for_bit(prepare: Callable[..., preamp.Session]) -> None:
    ends = []
    for stop in (False, True):
        model = mlp()
        optimizer = AdamW(model.parameters(), 1e-2, eps=1e-4, master="split24")
        session = prepare(model, optimizer, "O5")
        for index in range(6):
            if stop and index == 3:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), session.state_dict()))
                model = mlp(1)
                optimizer = AdamW(model.parameters(), 1e-2, eps=1e-4, master="split24")
                session = prepare(model, optimizer, "O5")
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                session.load_state_dict(saved[2])
            step(session, model, index)
        session.close()
        ends.append(weights(model))
    assert same(*ends)


def test_full_precision_inside_steps_nothing_and_close_lets_go() -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), 0.1)
    session = preamp.prepare(model, optimizer, level="O5", release_gradients=True)
    step(session, model, 0)
    before = weights(model)
    with session.full_precision():
        loss_of(model, 1).backward()
    assert same(before, weights(model)) and all(p.grad is None for p in model.parameters())
    session.close()
    loss_of(model, 2).backward()
    assert all(isinstance(p, Parameter) and p.grad is not None for p in model.parameters())
    lost = weakref.ref(session)
    del session
    gc.collect()
    assert lost() is None


def test_sparse_gradients_are_the_optimizers_error(prepare: Callable[..., preamp.Session]) -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    session = prepare(model, SGD(model.parameters(), 0.1), "O4")
    before = weights(model[0])
    with session.autocast():
        loss = model(torch.tensor([1, 1, 3])).sum()
    with pytest.raises(OptimizerError, match="sparse"):
        session.backward(loss)
    assert same(before, weights(model[0]))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_whose_gradients_are_exchanged_is_refused(when: str) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = mlp()
        optimizer = SGD(model.parameters(), 0.1)
        if when == "before":
            with pytest.raises(SessionError, match="exchanged"):
                preamp.prepare(
                    nn.parallel.DistributedDataParallel(model), optimizer, level="O4", release_gradients=True
                )
            return
        with preamp.prepare(model, optimizer, level="O4", release_gradients=True) as session:
            wrapped = nn.parallel.DistributedDataParallel(model)
            before = weights(model)
            with session.autocast():
                loss = loss_of(wrapped, 0)
            with pytest.raises(SessionError, match="exchanged"):
                session.backward(loss)
            assert same(before, weights(model))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("then", ["the next batch", "zero_grad"])
def test_a_pass_that_was_interrupted_is_given_up(prepare: Callable[..., preamp.Session], then: str) -> None:
    model = mlp()
    session = prepare(model, SGD(model.parameters(), 0.1), "O5")

    def interrupted(_: Tensor) -> None:
        raise KeyboardInterrupt

    handle = model[0].weight.register_post_accumulate_grad_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.backward(loss_of(model, 0)) if then == "the next batch" else loss_of(model, 0).backward()
    handle.remove()
    if then == "zero_grad":
        with pytest.warns(preamp.PreampWarning, match="stepped already"):
            session.zero_grad()
    with pytest.raises(SessionError, match=r"without session\.backward"):
        session.step()
    assert not step(session, model, 1).skipped


def autograd_grad(session: preamp.Session, model: Any, index: int) -> None:
    with session.autocast():
        loss = loss_of(model, index)
    for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True):
        parameter.grad = gradient


def evaluated(session: preamp.Session, model: Any, index: int) -> None:
    with session.full_precision():
        loss = loss_of(model, index)
    session.backward(loss)


@pytest.mark.parametrize("how", [autograd_grad, evaluated])
def test_gradients_that_come_on_another_way_are_stepped_and_freed(
    prepare: Callable[..., preamp.Session], how: Callable[..., None]
) -> None:
    ends = []
    for release in (False, True):
        model = mlp()
        session = prepare(model, AdamW(model.parameters(), 1e-2, eps=1e-4), "O5", release)
        for index in range(3):
            how(session, model, index)
            assert not session.step().skipped
            assert not release or all(p.grad is None for p in model.parameters())
            session.zero_grad()
        ends.append(weights(model))
        session.close()
    assert same(*ends)


def test_gradients_that_are_thrown_away_are_told_to_have_been_stepped(prepare: Callable[..., preamp.Session]) -> None:
    """A loop that does not like a loss after its backward pass, say."""
    model = mlp()
    session = prepare(model, SGD(model.parameters(), 0.1), "O5")
    session.backward(loss_of(model, 0))
    with pytest.warns(preamp.PreampWarning, match="stepped already") as told:
        session.zero_grad()
    assert told[0].filename == __file__ or TORCH < (2, 7)  # whose wrapper has a frame of its own
    step(session, model, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.zero_grad()


@over(level=["O4", "O5"], kind=OPTIMIZERS)
def test_a_loss_that_reaches_no_parameter_of_the_optimizer(level: str, kind: str) -> None:
    model = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
    before = weights(model)
    optimizer = OPTIMIZERS[kind](model[0].parameters())
    with preamp.prepare(model, optimizer, level, release_gradients=True) as session:
        with session.autocast():
            loss = model[1](torch.randn(4, 6)).float().sum()
        session.backward(loss)
        report = session.step()
        assert (report.skipped, report.grad_norm, report.nonfinite) == (False, 0.0, ())
    assert same(before, weights(model))
