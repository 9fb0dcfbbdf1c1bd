"""What prepare() does to a model's classes and methods, and that others may do the same meanwhile and afterwards."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import weakref
from typing import Any, Generic, TypeVar

import pytest
import torch
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import preamp
from preamp.errors import PreampWarning, SessionError

from ..rows import over
from .toys import LEVELS, batch, loss_of, mlp, same, step, weights

T = TypeVar("T")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, labels: Any = None) -> Tensor:
        """What it does."""
        return self.norm(self.layer(x))


class GenericFirst(Generic[T], Net):
    pass


class GenericLast(Net, Generic[T]):
    pass


class GenericLinear(nn.Linear, Generic[T]):
    pass


class WithSlots(Net):
    __slots__ = ("extra",)


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


def prepared(model: nn.Module, level: str) -> preamp.Session:
    return preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level)


@pytest.mark.parametrize("level", LEVELS)
def test_forward_keeps_its_signature(level: str) -> None:
    model = Net()
    before = inspect.signature(model.forward), model.forward.__doc__, model.forward.__qualname__
    with prepared(model, level):
        assert (inspect.signature(model.forward), model.forward.__doc__, model.forward.__qualname__) == before
        assert not hasattr(model.forward, "__wrapped__"), "frameworks unwrap that, and would lose the casts"
    assert (inspect.signature(model.forward), model.forward.__doc__, model.forward.__qualname__) == before


@over(level=LEVELS, make=[GenericFirst[int], GenericLast, lambda: GenericLinear(4, 4), WithSlots])
def test_generic_classes(level: str, make: Any) -> None:
    model = make()
    kind = type(model)
    with prepared(model, level) as session, session.autocast():
        assert isinstance(model, kind)
        assert model(torch.ones(2, 4)).isfinite().all()
        thawed = pickle.loads(pickle.dumps(model))
        assert isinstance(thawed, kind) and (type(thawed) is kind) == (level in ("O0", "O1", "O4"))
    assert type(model) is kind


@pytest.mark.parametrize("level", LEVELS)
def test_a_forward_that_a_framework_wrapped_outlives_the_session(level: str) -> None:
    model = Net()
    expected = model(torch.ones(2, 4))
    session = prepared(model, level)
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)  # type: ignore[method-assign]
    with session.autocast():
        model(torch.ones(2, 4))
    session.close()
    assert torch.allclose(model(torch.ones(2, 4)), expected, atol=1e-2 if level == "O3" else 0)


@pytest.mark.parametrize("level", LEVELS)
def test_a_norm_that_is_parametrized_while_prepared(level: str) -> None:
    model = Net()
    session = prepared(model, level)
    for module in (model.norm, model.layer):
        parametrize.register_parametrization(module, "weight", Halved())
    with session.autocast():
        inside = model(torch.ones(2, 4)).float()
    session.close()
    assert type(model.norm).__mro__[1] is nn.LayerNorm
    assert torch.allclose(model(torch.ones(2, 4)), inside, atol=2e-2)
    for module in (model.norm, model.layer):
        parametrize.remove_parametrizations(module, "weight")
    assert type(model.norm) is nn.LayerNorm and type(model.layer) is nn.Linear


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_classes_of_parametrized_modules_are_not_kept(level: str) -> None:
    """torch makes a class for each."""
    alive = []
    for _ in range(5):
        model = nn.Sequential(nn.GRU(8, 8), nn.LayerNorm(8))
        nn.utils.parametrizations.weight_norm(model[0], "weight_ih_l0")
        prepared(model, level).close()
        alive += [weakref.ref(model), weakref.ref(model[0]), weakref.ref(type(model[0]))]
        del model
    gc.collect()
    assert not any(reference() is not None for reference in alive)


@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_of_a_prepared_model_may_be_prepared(level: str) -> None:
    model = mlp()
    with prepared(model, level) as session:
        session.backward(session.autocast()(loss_of)(model, 0))
        session.step()
        best = copy.deepcopy(model)
        dtypes = [p.dtype for p in best.parameters()]
        with prepared(best, level) as other:
            assert not other.backward(other.autocast()(loss_of)(best, 1))
            other.step()
            assert not same(weights(best), weights(model))
        assert [p.dtype for p in best.parameters()] == dtypes
        assert [type(m) for m in best.modules()] == [type(m) for m in mlp().modules()]


@pytest.mark.parametrize("make", [torch.optim.SGD, preamp.optim.SGD])
@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_whose_session_was_lost_may_be_prepared_anew(level: str, make: Any) -> None:
    model = mlp()
    optimizer = make(model.parameters(), 0.1)
    for _ in range(2):
        session = preamp.prepare(model, optimizer, level, scale=8.0)
        step(session, model, 0)
        optimizer.load_state_dict(optimizer.state_dict())
        del session
        gc.collect()
        optimizer.load_state_dict(optimizer.state_dict())
    before = weights(model)
    with preamp.prepare(model, optimizer, level, scale=8.0) as session:
        step(session, model, 1)
    assert not same(before, weights(model))


def test_a_model_whose_session_was_lost_may_be_prepared_anew() -> None:
    model = mlp()
    preamp.prepare(model, None, level="O5")
    gc.collect()
    with prepared(model, "O5") as session:
        session.backward(loss_of(model, 0))
        session.step()
    assert [type(m) for m in model.modules()] == [type(m) for m in mlp().modules()]


@over(first=LEVELS, second=LEVELS)
def test_one_model_has_one_session(first: str, second: str) -> None:
    model = mlp()
    with prepared(model, first):
        for whole in (model, model[0], nn.Sequential(model)):
            with pytest.raises(SessionError, match="already prepared"):
                prepared(whole, second)
    with prepared(model, second):
        pass


@pytest.mark.filterwarnings("ignore:.*without masters")
@over(level=LEVELS)
def test_one_optimizer_has_one_session(level: str) -> None:
    models = [mlp(), mlp()]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    told = r"the SGD is in a session that is open: close\(\) that one first"
    for _ in range(2):
        with preamp.prepare(models[0], optimizer, level=level), pytest.raises(SessionError, match=told):
            preamp.prepare(models[1], optimizer, level=level)
    assert all(p.dtype is torch.float32 for p in models[1].parameters())


@pytest.mark.filterwarnings("ignore:.*without masters")
@over(level=LEVELS, within=(False, True))
def test_models_of_one_session_share_modules_in_a_list_of_both(level: str, within: bool) -> None:
    first = mlp()
    second = nn.Sequential(first, nn.Linear(3, 2)) if within else nn.Sequential(first[0], nn.Linear(16, 2))
    classes, both = list(map(type, (*first, *second))), nn.ModuleList([first, second])
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    with pytest.raises(SessionError, match=r"'0(\.0)?' of this model is in another one.*nn\.ModuleList\(\[a, b\]\)"):
        preamp.prepare([first, second], optimizer, level=level)
    assert list(map(type, (*first, *second))) == classes
    before, dtype = weights(both), torch.float16 if level == "O3" else torch.float32  # which has no regions
    with preamp.prepare(both, optimizer, level=level, scale=8.0) as session:
        with session.autocast():
            outs = [model(batch(index)[0].to(dtype)).float() for index, model in enumerate((first, second))]
            loss = outs[0].square().mean() + outs[1].square().mean()
        session.backward(loss)
        assert not session.step().skipped
    assert not any(map(torch.equal, weights(both), before))


def test_frozen_parts_may_be_shared_by_sessions_that_do_not_change_them() -> None:
    frozen = mlp(1).requires_grad_(False)
    one, two = nn.Sequential(mlp(), frozen[:2]), nn.Sequential(mlp(2), frozen[:2])
    with (
        preamp.prepare(one, torch.optim.SGD(one[0].parameters(), 0.1), level="O4"),
        preamp.prepare(two, torch.optim.SGD(two[0].parameters(), 0.1), level="O4"),
    ):
        pass


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_foreign_region_of_another_dtype_is_told(level: str) -> None:
    """As Accelerate, Fabric and the HF Trainer enter around a model's forward, by themselves."""
    model = Net()
    with prepared(model, level) as session:
        low, other = session.policy.compute, torch.bfloat16 if level != "O5" else torch.float16
        names = {torch.float16: "fp16", torch.bfloat16: "bf16"}
        inner = model.forward
        model.forward = torch.autocast("cpu", other)(inner)  # type: ignore[method-assign]
        with (
            pytest.warns(PreampWarning, match=f"compute in {names[low]}.*region of {names[other]}"),
            session.autocast(),
        ):
            model(torch.ones(2, 4))
        model.forward = torch.autocast("cpu", low)(inner)  # type: ignore[method-assign]
        with session.autocast():
            model(torch.ones(2, 4))
        with torch.autocast("cpu", other), session.full_precision():
            model(torch.ones(2, 4))  # the region caches casts of masters, which have to leave all the same
        assert model.layer.weight.dtype is low


@over(level=["O2", "O5"], inside=[True, False])
def test_a_table_of_positions_that_stays_float32_meets_16_bit_weights(level: str, inside: bool) -> None:
    """In a session's region and outside of any: there the model enters one of its own."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(5, 8))
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.first(x + self.table) + self.table))

    torch.manual_seed(0)
    model, x = Positions(), torch.randn(3, 5, 8)
    expected = model(x)
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level, scale=2.0) as session:
        with session.autocast(enabled=inside):
            found = model(x).float()
        assert model.table.dtype is torch.float32 and model.first.weight.dtype is session.policy.params
        assert not torch.is_autocast_enabled("cpu")
        assert torch.allclose(found, expected, atol=3e-2)
        session.backward(found.square().mean())
        assert not session.step().skipped
        with session.full_precision(), torch.no_grad():
            assert model(x).dtype is torch.float32


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_copies_are_plain_float32_models_with_the_masters_values(level: str) -> None:
    """As averages, teachers and target networks are made, at whatever point of a step; the step takes no notice."""

    def trained(copies: bool) -> tuple[nn.Module, list[nn.Module], list[Tensor]]:
        model, made = mlp(), []
        optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
        with preamp.prepare(model, optimizer, level=level) as session:
            for step in range(3):
                x, y = batch(step)
                with session.autocast():
                    made += [copy.deepcopy(model)] if copies else []
                    loss = F.cross_entropy(model(x).float(), y)
                made += [copy.deepcopy(nn.ModuleDict({"of": model}))["of"]] if copies else []
                session.backward(loss)
                made += [copy.deepcopy(model)] if copies else []
                session.step()
                made += [copy.deepcopy((model, optimizer))[0]] if copies else []
                session.zero_grad()
            with session.full_precision(values_only=True):
                exact = [p.detach().clone() for p in model.parameters()]
        return model, made, exact

    model, made, exact = trained(copies=True)
    _, _, alone = trained(copies=False)
    x, _ = batch(0)
    for each in made:
        assert [type(module) for module in each.modules()] == [type(module) for module in model.modules()]
        assert {p.dtype for p in each.parameters()} == {torch.float32} and each(x).dtype is torch.float32
    for mine, copied, theirs in zip(exact, made[-1].parameters(), alone, strict=True):
        assert torch.equal(mine, copied) and torch.equal(mine, theirs)
    first, last = (next(iter(each.parameters())) for each in (made[0], made[-1]))
    assert not torch.equal(first, last) and all(p.grad is None for each in made for p in each.parameters())


@pytest.mark.parametrize("master", ["split", "split24"])
def test_copies_have_the_values_of_split_masters(master: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 4))
    optimizer = preamp.optim.AdamW(model.parameters(), lr=1e-3, master=master)
    with preamp.prepare(model, optimizer, level="O5") as session:
        for _ in range(3):
            with session.autocast():
                loss = model(torch.randn(4, 64)).float().square().mean()
            session.backward(loss)
            session.step()
            session.zero_grad()
        copied = copy.deepcopy(model)
        with session.full_precision(values_only=True):
            assert all(map(torch.equal, model.parameters(), copied.parameters()))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_another_thread_may_copy_a_model_while_it_trains(level: str) -> None:
    def trained(copying: bool) -> tuple[list[Tensor], list[nn.Module]]:
        model, made, done = mlp(), [], threading.Event()

        def copy_on() -> None:
            while not done.is_set():
                made.append(copy.deepcopy(model))
                del made[:-3]

        thread = threading.Thread(target=copy_on)
        with preamp.prepare(model, torch.optim.SGD(model.parameters(), 1e-2), level=level) as session:
            if copying:
                thread.start()
            try:
                for step in range(60):
                    x, y = batch(step % 4)
                    with session.autocast():
                        loss = F.cross_entropy(model(x).float(), y)
                    session.backward(loss)
                    session.step()
                    session.zero_grad()
            finally:
                done.set()
                thread.join() if copying else None
        return [p.detach() for p in model.parameters()], made

    (mine, made), (alone, _) = trained(copying=True), trained(copying=False)
    assert made and all(p.dtype is torch.float32 for each in made for p in each.parameters())
    assert all(map(torch.equal, mine, alone))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_average_of_weights_moves_or_is_an_error(level: str) -> None:
    """In 16 bits one that moves by a thousandth of the difference would stand still, and say nothing."""
    model = mlp()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level) as session:
        by_torch, by_hand = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999)), copy.deepcopy(model)
        start = copy.deepcopy(model)
        by_torch.update_parameters(model)  # the first one copies
        for step in range(3):
            x, y = batch(step)
            with session.autocast():
                loss = F.cross_entropy(model(x).float(), y)
            session.backward(loss)
            session.step()
            session.zero_grad()
            with torch.no_grad():
                for average, p in zip(by_hand.parameters(), model.parameters(), strict=True):
                    average.mul_(0.999).add_(p, alpha=0.001)
        with pytest.raises(RuntimeError, match="dtype"):
            by_torch.update_parameters(model)
        with session.full_precision(values_only=True):
            by_torch.update_parameters(model)
        for each in (by_hand, by_torch.module):
            pairs = zip(each.parameters(), start.parameters(), strict=True)
            assert all(0 < (p - q).abs().max() < 0.01 for p, q in pairs)
