"""Masters take a parameter's place and leave it again: what others have hung on the parameter is there as before."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule

import preamp
from preamp.errors import SessionError
from preamp.ledger.swap import swap

from ..rows import over

MAKERS = {"torch": torch.optim.AdamW, "preamp": preamp.optim.AdamW}


def _made(level: str, make: Any) -> tuple[nn.Module, torch.optim.Optimizer, preamp.Session]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = make(model.parameters(), lr=1e-2, **({"eps": 1e-4} if level == "O3" else {}))
    return model, optimizer, preamp.prepare(model, optimizer, level=level)


def _accumulators(model: nn.Module, fired: list[str]) -> list[Any]:
    """Hooks as DistributedDataParallel hangs them: on the nodes that gradients arrive at, which it keeps alive."""
    nodes = []
    for name, parameter in model.named_parameters():
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, name=name: fired.append(name))
        nodes.append(node)
    return nodes


def _between(session: preamp.Session, optimizer: torch.optim.Optimizer, what: str) -> None:
    if what == "unscale_":
        session.unscale_()
    elif what == "clip":
        session.unscale_()
        session.clip_grad_norm_(1.0)
    elif what == "values":
        session.clip_grad_value_(0.1)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("what", ["step", "unscale_", "clip", "values", "full_precision", "load", "zeroed"])
def test_hooks_on_gradient_accumulators_fire_in_every_step(level: str, kind: str, what: str) -> None:
    model, optimizer, session = _made(level, MAKERS[kind])
    fired: list[str] = []
    kept = _accumulators(model, fired)
    names = sorted(name for name, _ in model.named_parameters())
    with session:
        for _ in range(3):
            fired.clear()
            with session.autocast():
                loss = model(torch.randn(4, 6)).float().square().mean()
            session.backward(loss)
            assert sorted(fired) == names
            _between(session, optimizer, what)
            session.step()
            session.zero_grad(set_to_none=what != "zeroed")
            if what == "full_precision":
                with session.full_precision():
                    assert all(p.dtype is torch.float32 for p in model.parameters())
                    model(torch.randn(4, 6))
            elif what == "load":
                optimizer.load_state_dict(optimizer.state_dict())
                session.load_state_dict(session.state_dict())
    assert len(kept) == 4


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_gradients_that_lie_in_somebody_elses_memory_stay_there(level: str) -> None:
    """DistributedDataParallel(gradient_as_bucket_view=True) has gradients be views of its buckets."""
    model, optimizer, session = _made(level, torch.optim.AdamW)
    with session:
        for _ in range(3):
            with session.autocast():
                loss = model(torch.randn(4, 6)).float().square().mean()
            session.backward(loss)
            before = {p: (p.grad, p.grad.data_ptr(), p.grad.clone()) for p in model.parameters() if p.grad is not None}
            session.unscale_()
            assert all(p.grad is not before[p][0] and p.grad.dtype is torch.float32 for p in model.parameters())
            session.step()
            for p in model.parameters():
                _, place, numbers = before[p]
                assert p.grad is not None
                assert p.grad.data_ptr() == place
                assert torch.equal(p.grad, numbers)
            optimizer.zero_grad(set_to_none=False)


def test_where_something_refers_to_the_tensor_itself_data_and_gradients_are_exchanged() -> None:
    wide, low = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.zeros(3, 3, dtype=torch.bfloat16))
    references = [torch._C._WeakTensorRef(each) for each in (wide, low)]
    kept, wide.grad = wide.detach().clone(), torch.ones(3, 3)
    swap(wide, low)
    assert wide.dtype is torch.bfloat16 and wide.grad is None and not wide.any()
    assert torch.equal(low, kept) and low.grad is not None and bool(low.grad.all())
    swap(wide, low)
    assert torch.equal(wide, kept) and wide.grad is not None and low.grad is None
    assert not any(reference.expired() for reference in references)


def test_a_weak_reference_that_came_in_between_is_told_and_changes_nothing() -> None:
    wide, low = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.zeros(3, 3, dtype=torch.bfloat16))
    kept = wide.detach().clone()
    swap(wide, low)
    reference = torch._C._WeakTensorRef(low)
    with pytest.raises(SessionError, match="profiler"):
        swap(wide, low)
    assert torch.equal(low, kept) and not reference.expired()
    del reference
    swap(wide, low)
    assert torch.equal(wide, kept)


def test_where_other_processes_may_wait_for_an_accumulator_the_reference_is_told(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    wide = nn.Parameter(torch.randn(3, 3))
    kept, reference = wide.detach().clone(), torch._C._WeakTensorRef(wide)
    with pytest.raises(SessionError, match="weak reference"):
        swap(wide, nn.Parameter(torch.zeros(3, 3)))
    assert torch.equal(wide, kept) and not reference.expired()


def _trained(level: str, kind: Any, profiled: bool, **records: Any) -> list[Any]:
    """Weights, outputs in full precision, and what hooks have seen, of a loop with backward passes of all kinds."""
    model, _, session = _made(level, kind)
    seen: list[Any] = []
    first = model[0].weight
    first.register_hook(lambda grad: seen.append(grad.float().norm()))
    first.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.float().norm()))
    chance = torch.Generator().manual_seed(0)
    x = [torch.randn(4, 6, generator=chance) for _ in range(8)]
    times = schedule(wait=1, warmup=1, active=2, repeat=2)
    profiler: Any = nullcontext()
    if profiled:
        profiler = profile(activities=[ProfilerActivity.CPU], schedule=times, **records)

    def loss_of(batch: Tensor) -> Tensor:
        return model(batch).float().square().mean()

    with session, profiler:
        for i, batch in enumerate(x):
            with session.autocast():
                loss = loss_of(batch)
            with session.full_precision():
                seen.append(loss_of(batch).detach())
                late = loss_of(batch)
                if i == 5:
                    session.backward(loss_of(batch))
            if i == 3:
                session.backward(late)
            session.backward(loss)  # of a pass before full precision
            if i == 4:
                session.backward(late)  # of one inside
            session.clip_grad_norm_(1.0)
            session.step()
            session.zero_grad()
            if profiled:
                profiler.step()
    return [*seen, *(p.detach() for p in model.parameters())]


@pytest.mark.filterwarnings("ignore:.*[Pp]rofiler")
@over(level=["O2", "O5"], kind=MAKERS, records=["record_shapes", "with_stack"])
def test_a_profiler_changes_nothing(level: str, kind: str, records: str) -> None:
    """One that records shapes or stacks refers to every tensor that operators are given; no step ran beside it."""
    make = MAKERS[kind]
    for alone, beside in zip(_trained(level, make, False), _trained(level, make, True, **{records: True}), strict=True):
        assert (alone - beside).norm() <= 1e-2 * alone.norm()  # float32 added to 16 bits is rounded later


@over(level=["O1", "O2", "O3", "O4", "O5"], kind=MAKERS, where=["inside", "after"])
def test_hooks_of_parameters_hold_for_losses_of_full_precision(level: str, kind: str, where: str) -> None:
    """They bound or mask gradients; nothing was called where a master was in the parameter's place."""
    model, _, session = _made(level, MAKERS[kind])
    torch.manual_seed(0)
    plain, first = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), model[0].weight
    counts: Counter[str] = Counter()

    def count(what: str, factor: float) -> Callable[[Tensor], Tensor]:
        return lambda grad: (counts.update([what]), grad * factor)[1]

    first.register_hook(count("before", 0.5))
    first.register_post_accumulate_grad_hook(lambda _: counts.update(["after"]))
    gone = first.register_hook(count("removed inside", 2.0))
    x = torch.randn(4, 6)
    with session:
        with session.full_precision():
            gone.remove()
            first.register_hook(count("made inside", 0.5))
            loss = model(x).square().mean()
            if where == "inside":
                session.backward(loss)
        if where == "after":
            session.backward(loss)
        session.unscale_()
        plain(x).square().mean().backward()
        assert counts == dict.fromkeys(["before", "made inside", "after"], 1)
        torch.testing.assert_close(first.grad.float(), plain[0].weight.grad / 4, rtol=2e-2, atol=1e-4)
        torch.testing.assert_close(model[2].weight.grad.float(), plain[2].weight.grad, rtol=2e-2, atol=1e-4)
        session.zero_grad()
        with session.autocast():
            loss = model(x).float().square().mean()
        session.backward(loss)
    assert counts == dict.fromkeys(["before", "made inside", "after"], 2)


@over(level=["O1", "O2", "O4", "O5"], kind=MAKERS)
def test_hooks_that_are_made_before_a_step_stay(level: str, kind: str) -> None:
    model, _, session = _made(level, MAKERS[kind])
    counts: Counter[str] = Counter()
    with session:
        for i in range(3):
            with session.autocast():
                loss = model(torch.randn(4, 6)).float().square().mean()
            session.backward(loss)
            session.unscale_()
            if i == 0:
                model[0].weight.register_hook(lambda _: counts.update(["before"]))
                model[0].weight.register_post_accumulate_grad_hook(lambda _: counts.update(["after"]))
            session.step()
            session.zero_grad()
    model(torch.randn(4, 6)).square().mean().backward()
    assert counts == {"before": 3, "after": 3}


@over(level=["O1", "O2", "O4", "O5"], kind=MAKERS, pass_=["evaluation", "training"])
def test_a_model_runs_outside_of_regions_while_masters_are_in_place(level: str, kind: str, pass_: str) -> None:
    model, _, session = _made(level, MAKERS[kind])
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(4, 6)
    losses = [plain(x).square().mean(), plain(2 * x).square().mean()]
    with session:
        with session.autocast():
            loss = model(x).float().square().mean()
        session.backward(loss)
        session.unscale_()
        with torch.set_grad_enabled(pass_ == "training"):
            again = model(2 * x).float().square().mean()
        torch.testing.assert_close(again, losses[1].detach(), rtol=2e-2, atol=1e-3)
        if pass_ == "training":
            session.backward(again)
        sum(losses[: 2 if pass_ == "training" else 1]).backward()  # type: ignore[union-attr]
        session.unscale_()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=5e-2, atol=2e-3)


@over(level=["O1", "O2"], kind=MAKERS)
def test_a_backward_of_ones_own_of_a_loss_of_full_precision_is_refused_beside_scaled_gradients(
    level: str, kind: str
) -> None:
    model, _, session = _made(level, MAKERS[kind])
    with session:
        with session.full_precision():
            late = model(torch.randn(4, 6)).square().mean()
        with session.autocast():
            loss = model(torch.randn(4, 6)).float().square().mean()
        session.backward(loss)
        with pytest.raises(SessionError, match="has added gradients"):
            late.backward()


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_region_of_another_thread_refers_to_no_master(level: str, monkeypatch: Any) -> None:
    """Not even where it casts a weight again between the moment that kept casts are dropped and the exchange."""
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: None)
    model, _, session = _made(level, torch.optim.AdamW)
    evaluated, end = threading.Event(), threading.Event()

    def evaluate() -> None:
        with session.autocast():
            torch.mm(model[0].weight, model[0].weight.T)
            evaluated.set()
            end.wait()

    with session:
        with session.autocast():
            loss = model(torch.randn(4, 6)).float().square().mean()
        session.backward(loss)
        session.unscale_()
        thread = threading.Thread(target=evaluate)
        thread.start()
        evaluated.wait()
        try:
            assert not session.step().skipped
        finally:
            end.set()
            thread.join()


def test_casts_that_a_region_keeps_are_no_hindrance() -> None:
    wide = nn.Parameter(torch.randn(3, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.mm(wide, wide)  # whose cast autocast keeps, by a weak reference
        swap(wide, nn.Parameter(torch.zeros(3, 3)))
        assert not torch.mm(wide, wide).any()
