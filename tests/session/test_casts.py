"""How often weights are cast, counted under a dispatch mode; and that kept casts are never old ones."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import preamp
from preamp.session._casts import CacheProbe

from .toys import batch, loss_of, mlp, same, weights


class Casts(TorchDispatchMode):
    """Counts casts to 16 bits of the weights that are given, by the memory they live in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.of = {p.data_ptr(): 0 for p in model.parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if "_to_copy" in str(func) and out.dtype in (torch.float16, torch.bfloat16) and args[0].data_ptr() in self.of:
            self.of[args[0].data_ptr()] += 1
        return out

    @property
    def most(self) -> int:
        return max(self.of.values())


def micro(session: preamp.Session, model: nn.Module, step: int, **how: bool) -> Tensor:
    with session.autocast():
        loss = loss_of(model, step)
    session.backward(loss, **how)
    return loss


@pytest.mark.parametrize(("level", "casts"), [("O1", 1), ("O4", 1), ("O2", 0), ("O5", 0), ("O3", 0), ("O0", 0)])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("told", [True, False])
def test_casts_per_weight_and_step(level: str, casts: int, micro_batches: int, told: bool) -> None:
    model = mlp()
    optimizer = preamp.optim.SGD(model.parameters(), 1e-3)
    with preamp.prepare(model, optimizer, level=level) as session:
        for step in range(3):
            with Casts(model) as counted:
                for i in range(micro_batches):
                    micro(session, model, step, **({"sync": i == micro_batches - 1} if told else {}))
                session.step()
            session.zero_grad()
            if step:  # the first step looks on: whether anything is recomputed, and whether gradients are accumulated
                assert counted.most == casts, (step, counted.of)


def first_step(session: preamp.Session, model: nn.Module) -> None:
    """After it, a session keeps casts."""
    micro(session, model, 0)
    session.step()
    session.zero_grad()


def test_accumulation_comes_to_the_same() -> None:
    results = []
    for told in (True, False):
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        with preamp.prepare(model, optimizer, level="O4") as session:
            for step in range(4):
                for i in range(3):
                    micro(session, model, 3 * step + i, sync=not told or i == 2)
                session.step()
                session.zero_grad()
        results.append(weights(model))
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(4):
        for i in range(3):
            with preamp.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, 3 * step + i)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same(results[0], weights(model)) and same(results[1], weights(model))


def output(session: preamp.Session, model: nn.Module) -> Tensor:
    with session.autocast():
        return model(batch(0)[0]).detach()


@pytest.mark.parametrize("change", ["write", "load", "optimizer", "scheduled step", "grad off"])
def test_kept_casts_are_not_used_once_a_weight_has_changed(change: str) -> None:
    model = mlp(norm=False)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with preamp.prepare(model, optimizer, level="O4") as session:
        first_step(session, model)
        micro(session, model, 0, sync=False)
        before = output(session, model)
        if change == "write":
            with torch.no_grad():
                model[0].weight.mul_(2)
        elif change == "load":
            model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
        elif change == "optimizer":
            optimizer.step()
        elif change == "scheduled step":
            session.step()
        else:
            with torch.no_grad():
                model[0].weight.mul_(2)
                assert not torch.equal(output(session, model), before)
        after = output(session, model)
        assert not torch.equal(after, before)
        with preamp.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(model(batch(0)[0]), after)


def test_other_regions_and_sessions_are_as_they_were() -> None:
    """A plain region that ends clears the cache as always, and a closed session leaves nothing in it."""
    model, other = mlp(), mlp()
    session = preamp.prepare(model, torch.optim.SGD(model.parameters(), 1e-3), level="O4")
    first_step(session, model)
    micro(session, model, 0, sync=False)
    with Casts(other) as counted:
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss_of(other, 0)
    assert counted.most == 2
    micro(session, model, 1, sync=False)
    session.close()
    with Casts(model) as counted, torch.autocast("cpu", dtype=torch.bfloat16):
        loss_of(model, 0)
    assert counted.most == 1
    assert torch.autocast_increment_nesting() == 1 and torch.autocast_decrement_nesting() == 0


def test_an_exception_in_a_region_leaves_no_casts() -> None:
    model = mlp()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 1e-3), level="O4") as session:
        first_step(session, model)
        micro(session, model, 0, sync=False)
        with pytest.raises(ZeroDivisionError), session.autocast():
            loss_of(model, 1)
            raise ZeroDivisionError
        model[0].weight.data.mul_(2)  # no trace of this write but in the values
        first = output(session, model)
        with preamp.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(model(batch(0)[0]), first)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_inference_mode_between_micro_batches(level: str) -> None:
    """Whether the cache was cleared is looked up there too, and inference tensors do not stay in it."""
    results = []
    for asks in (True, False):
        model = mlp()
        with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level) as session:
            for step in range(3):
                for i in range(2):
                    micro(session, model, 2 * step + i)
                    with torch.inference_mode() if asks else contextlib.nullcontext():
                        output(session, model)
                session.step()
                session.zero_grad()
        results.append(weights(model))
    assert same(*results)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_recompute_right(reentrant: bool) -> None:
    def run(kept: bool) -> list[Tensor]:
        model = mlp(norm=False)
        with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level="O4") as session:
            for step in range(3):
                for i in range(2):
                    x, y = batch(step + i)
                    with session.autocast():
                        hidden = checkpoint(model[:2], x.requires_grad_(), use_reentrant=reentrant)
                        loss = nn.functional.cross_entropy(model[2:](hidden).float(), y)
                    session.backward(loss, sync=not kept or i == 1)
                session.step()
                session.zero_grad()
            return weights(model)

    assert same(run(True), run(False))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_session_that_saw_a_recomputation_keeps_nothing(reentrant: bool) -> None:
    """So that a forward pass makes the casts that its recomputation makes."""
    model = mlp(norm=False)
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 1e-3), level="O4") as session:
        for step in range(3):
            for i in range(2):
                x, y = batch(step + i)
                with Casts(model) as counted, session.autocast():
                    hidden = checkpoint(model[:2], x.requires_grad_(), use_reentrant=reentrant)
                    loss = nn.functional.cross_entropy(model[2:](hidden).float(), y)
                assert min(counted.of[p.data_ptr()] for p in model.parameters()) == 1, (step, i)
                session.backward(loss, sync=i == 1)
            session.step()
            session.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_probe_tells_a_cleared_cache(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        probe = CacheProbe()
    finally:
        torch.set_default_dtype(torch.float32)
    assert not probe.cleared()
    probe.plant()
    assert not probe.cleared() and not probe.cleared()
    probe.plant()
    with torch.autocast("cpu", torch.bfloat16):
        pass
    assert probe.cleared() and not probe.cleared()
    torch.clear_autocast_cache()


def test_a_decorated_function_and_threads() -> None:
    import threading

    model = mlp()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 1e-3), level="O4") as session:
        first_step(session, model)
        compute = session.autocast()(lambda step: loss_of(model, step))
        with Casts(model) as counted:
            session.backward(compute(0), sync=False)
            session.backward(compute(1))
            session.step()
        assert counted.most <= 2  # a decorator enters a region of its own at each call
        results: list[bool] = []

        def work() -> None:
            results.append(torch.isfinite(output(session, model)).all().item())  # type: ignore[arg-type]

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert results == [True]
