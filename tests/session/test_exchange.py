"""Masters take a parameter's place and leave it again: what others have hung on the parameter is there as before."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from preamp.errors import SessionError
from preamp.ledger.swap import swap

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


def test_a_weak_reference_to_the_tensor_itself_is_told_and_changes_nothing() -> None:
    wide = nn.Parameter(torch.randn(3, 3))
    reference = torch._C._WeakTensorRef(wide)
    kept = wide.detach().clone()
    with pytest.raises(SessionError, match="weak reference"):
        swap(wide, nn.Parameter(torch.zeros(3, 3)))
    assert torch.equal(wide, kept) and not reference.expired()


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
