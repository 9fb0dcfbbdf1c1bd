"""Exceptions in the middle of a step, and two sessions at once: torch, model and optimizer are found as they were."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import preamp
from preamp.errors import CheckpointError

from ..rows import over
from ..session.toys import loss_of
from .runs import LEVELS, OPTIMIZERS, Run, alike

INF = float("inf")


def torch_state() -> dict[str, Any]:
    """What a fault could leave changed in torch."""
    torch.autocast_increment_nesting()
    state = {
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "dtypes": [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")],
        "cache": torch.is_autocast_cache_enabled(),
        "nesting": torch.autocast_decrement_nesting(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "modes": len(_get_current_dispatch_mode_stack()),
        "function modes": torch._C._len_torch_function_stack(),
        "default dtype": torch.get_default_dtype(),
        "saved tensor hooks": getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)(False),
        "rules hold": rules_hold(),
    }
    assert state["nesting"] == 0
    return state


def rules_hold() -> bool:
    """Whether the operator rules are those of a session at O1 or O4, seen from outside."""
    with torch.autocast("cpu", torch.bfloat16):
        return torch.ones(2, dtype=torch.bfloat16).softmax(-1).dtype is torch.float32


class Stumble(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ZeroDivisionError


def fail(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError


def in_the_forward_pass(run: Run) -> None:
    handle = run.model[2].register_forward_hook(fail)  # type: ignore[index]
    try:
        with run.session.autocast():
            loss_of(run.model, 9)
    finally:
        handle.remove()


def in_a_region_in_a_region(run: Run) -> None:
    with run.session.autocast(), torch.no_grad(), run.session.autocast(False), run.session.autocast():
        loss_of(run.model, 9)
        fail()


def in_backward(run: Run) -> None:
    with run.session.autocast():
        loss = Stumble.apply(run.model[0](torch.ones(2, 6))).float().sum()  # type: ignore[index]
    run.session.backward(loss)


def late_in_backward(run: Run) -> None:
    """Some gradients are there already."""
    with run.session.autocast():
        hidden = Stumble.apply(run.model[0](torch.ones(2, 6)))  # type: ignore[index]
        loss = run.model[1:](hidden).float().sum()  # type: ignore[index]
    run.session.backward(loss)


@contextmanager
def failing(register: Callable[[Callable[..., Any]], Any]) -> Iterator[None]:
    """A hook that raises, for the length of a block."""
    handle = register(fail)
    try:
        yield
    finally:
        handle.remove()


def in_a_gradient_hook(run: Run) -> None:
    with failing(next(run.model.parameters()).register_hook):
        run.step(9)


def before_the_step(run: Run) -> None:
    with failing(run.optimizer.register_step_pre_hook):
        run.step(9)


def before_the_step_of_true_gradients(run: Run) -> None:
    with run.session.autocast():
        loss = loss_of(run.model, 9)
    run.session.backward(loss)
    run.session.unscale_()
    with failing(run.optimizer.register_step_pre_hook):
        run.session.clip_grad_norm_(0.1)
        run.session.step()


def between_unscale_and_step(run: Run) -> None:
    with run.session.autocast():
        loss = loss_of(run.model, 9)
    run.session.backward(loss)
    run.session.unscale_()
    fail()


def in_full_precision(run: Run) -> None:
    with run.session.full_precision():
        run.model(torch.ones(2, 6))
        fail()


def loading_an_optimizer_state_that_does_not_fit(run: Run) -> None:
    state = run.optimizer.state_dict()
    try:
        run.optimizer.load_state_dict({"state": {}, "param_groups": state["param_groups"] * 2})
    except ValueError as error:
        raise ZeroDivisionError from error


FAULTS: list[Callable[[Run], None]] = [
    in_the_forward_pass, in_a_region_in_a_region, in_backward, late_in_backward,
    in_a_gradient_hook, before_the_step, before_the_step_of_true_gradients, between_unscale_and_step,
    in_full_precision, loading_an_optimizer_state_that_does_not_fit,
]  # fmt: skip


RUNS = [("O1", "torch"), ("O2", "torch"), ("O2", "preamp"), ("O4", "preamp"), ("O5", "torch"), ("O5", "preamp")]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__.replace("_", " "))
@pytest.mark.parametrize(("level", "kind"), RUNS)
def test_a_fault_changes_nothing_and_the_session_goes_on(level: str, kind: str, fault: Any) -> None:
    run, twin = Run(level, kind), Run(level, kind)
    for each in (run, twin):
        each.steps(0, 1, 2)
    before = torch_state()
    with pytest.raises(ZeroDivisionError):
        fault(run)
    run.session.zero_grad()
    assert torch_state() == before
    assert {n: p.dtype for n, p in run.model.named_parameters()} == {
        n: p.dtype for n, p in twin.model.named_parameters()
    }
    assert all(p.grad is None for p in run.model.parameters())
    assert alike(run.state(), twin.state())
    for each in (run, twin):
        each.steps(3, 4)
        each.step(5, factor=INF)
        each.step(6)
    assert alike(run.state(), twin.state())
    for each in (run, twin):
        each.close()
    assert alike(dict(run.model.state_dict()), dict(twin.model.state_dict()))
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}


@over(level=["O2", "O4"], fault=FAULTS)
def test_a_session_closes_right_after_a_fault(level: str, fault: Any) -> None:
    """As a program does that leaves `with preamp.prepare(...)` by the exception."""
    run, twin = Run(level), Run(level)
    for each in (run, twin):
        each.steps(0, 1)
    with pytest.raises(ZeroDivisionError), run.session:
        fault(run)
    twin.close()
    assert alike(dict(run.model.state_dict()), dict(twin.model.state_dict()))
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert all(p.grad is None or p.grad.dtype is torch.float32 for p in run.model.parameters())
    run.model.zero_grad()
    twin.model.zero_grad()
    for each in (run, twin):
        loss_of(each.model, 2).backward()
        each.optimizer.step()
    assert alike(dict(run.model.state_dict()), dict(twin.model.state_dict()))


@over(level=LEVELS, kind=OPTIMIZERS)
def test_a_hook_that_fails_after_the_step_finds_the_step_taken(level: str, kind: str) -> None:
    """torch's optimizers have stepped when their post hooks run: weights, masters and moments are the step's."""
    run, twin = Run(level, kind), Run(level, kind)
    for each in (run, twin):
        each.steps(0, 1, 2)
    handle = run.optimizer.register_step_post_hook(fail)
    with pytest.raises(ZeroDivisionError):
        run.step(3)
    handle.remove()
    run.session.zero_grad()
    twin.step(3)
    ours, theirs = run.state(), twin.state()
    assert alike(ours["model"], theirs["model"]) and alike(ours["optimizer"], theirs["optimizer"])
    assert alike(ours["session"]["masters"], theirs["session"]["masters"])
    for each in (run, twin):
        each.steps(4, 5)
    assert alike(run.state()["model"], twin.state()["model"])


@pytest.mark.parametrize("level", LEVELS)
def test_a_slice_of_a_prepared_model_computes(level: str) -> None:
    """nn.Sequential makes a slice of itself with its own class, which is then that of a casting module."""
    run, x = Run(level), torch.randn(4, 6)
    assert isinstance(run.model, torch.nn.Sequential)
    with run.session.autocast():
        assert torch.equal(run.model[1:](run.model[:1](x.to(run.model[0].weight.dtype))).float(), run.model(x).float())
    run.close()


PAIRS = [("O1", "O2"), ("O1", "O4"), ("O2", "O5"), ("O4", "O5"), ("O2", "O2")]


def schedule(run: Run) -> None:
    for index in range(8):
        run.step(index, factor=INF if index in (2, 5) else 1.0)


@over(pair=PAIRS, kind=OPTIMIZERS)
def test_two_sessions_do_not_disturb_each_other(pair: tuple[str, str], kind: str) -> None:
    """Interleaved step by step, one of them with faults, bit for bit what each is alone."""
    alone = []
    for seed, level in enumerate(pair):
        run = Run(level, kind, seed)
        schedule(run)
        alone.append(run.state())
        run.close()
    first, second = (Run(level, kind, seed) for seed, level in enumerate(pair))
    for index in range(8):
        with pytest.raises(ZeroDivisionError):
            in_backward(first)
        first.session.zero_grad()
        for run in (first, second):
            run.step(index, factor=INF if index in (2, 5) else 1.0)
    assert alike(first.state(), alone[0]) and alike(second.state(), alone[1])


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_two_sessions_in_threads(pair: tuple[str, str]) -> None:
    """Both prepared first; then each trains in a thread of its own, under an autocast state of its own."""
    runs = [Run(level, kind, seed) for seed, (level, kind) in enumerate(zip(pair, OPTIMIZERS, strict=True))]
    twins = [Run(level, kind, seed) for seed, (level, kind) in enumerate(zip(pair, OPTIMIZERS, strict=True))]
    for twin in twins:
        schedule(twin)
    failures: list[BaseException] = []
    start = threading.Barrier(2)

    def work(run: Run) -> None:
        try:
            start.wait(30)
            for index in range(8):
                run.step(index, factor=INF if index in (2, 5) else 1.0)
                with suppress(ZeroDivisionError):
                    in_the_forward_pass(run)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for run, twin in zip(runs, twins, strict=True):
        assert alike(run.state(), twin.state())


class FailsAlways:
    """An object that cannot be loaded, and not put back either."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        raise RuntimeError("it does not load")


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_what_fails_twice_keeps_nothing_else_from_being_put_back(level: str, tmp_path: Path) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with preamp.prepare(model, optimizer, level) as session:
        preamp.checkpoint.save(tmp_path / "last.pt", model, optimizer=optimizer, session=session, other={"a": 1})
        with session.full_precision(values_only=True), torch.no_grad():
            model.weight.zero_()
        with pytest.raises(CheckpointError, match="it does not load"):
            preamp.checkpoint.load(
                tmp_path / "last.pt", model, optimizer=optimizer, session=session, other=FailsAlways()
            )
        assert not model.weight.any()
