"""After a session, and after one that could not begin, torch, model and optimizer are what they were."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preamp
from preamp.autocast import PRODUCTS, REGISTRY
from preamp.errors import PolicyError, PreampWarning, SessionError

from ..rows import over
from .toys import LEVELS, mlp, same, step, weights

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch": lambda params: torch.optim.Adam(params, 1e-3, eps=1e-4),
    "preamp": lambda params: preamp.optim.Adam(params, 1e-3, eps=1e-4),
}


def seen(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return (
        list(map(type, model.modules())),
        [(p.dtype, p.data_ptr(), p._post_accumulate_grad_hooks) for p in model.parameters()],
        [id(b) for b in model.buffers()],
        len(optimizer._optimizer_load_state_dict_pre_hooks),
    )


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_rules_that_another_session_forbids(level: str, kind: str) -> None:
    other = mlp()
    model = mlp()
    optimizer = OPTIMIZERS[kind](model.parameters())
    before = seen(model, optimizer)
    with preamp.prepare(other, torch.optim.SGD(other.parameters(), 0.1), "O4"):
        with pytest.raises(PolicyError, match="whole process"):
            preamp.prepare(model, optimizer, policy=f"{level}; op softmax -> low")
        assert seen(model, optimizer) == before
    with preamp.prepare(model, optimizer, policy=f"{level}; op softmax -> low", scale=8.0) as session:
        assert not step(session, model, 0).skipped


@pytest.mark.parametrize("level", ["O1", "O3", "O4", "O5"])
def test_a_warning_of_prepare_that_is_an_error(level: str) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-50)
    before = seen(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PreampWarning, match="rounds to zero"):
            preamp.prepare(model, optimizer, level)
    assert seen(model, optimizer) == before
    with pytest.warns(PreampWarning, match="rounds to zero"):
        preamp.prepare(model, optimizer, level).close()


class LowMomentum(torch.optim.Optimizer):
    """Keeps its momentum in bfloat16, whatever its parameters are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param, dtype=torch.bfloat16))
                param.sub_(momentum.mul_(0.9).add_(param.grad), alpha=0.1)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_states_that_an_optimizer_keeps_in_a_dtype_of_its_own(level: str) -> None:
    model = mlp()
    optimizer = LowMomentum(model.parameters())
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with preamp.prepare(model, optimizer, level) as session:
        step(session, model, 0)
        assert {state["momentum"].dtype for state in optimizer.state.values()} == {torch.bfloat16}
    assert {state["momentum"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


class Replaced(nn.Module):
    """A network whose head is exchanged for another one while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.head if hasattr(self, "head") else self.new_head)(self.body(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_the_module_of_a_rule_is_replaced(level: str, kind: str) -> None:
    model = Replaced()
    optimizer = OPTIMIZERS[kind](model.parameters())
    with preamp.prepare(model, optimizer, policy=f"{level}; head -> full", scale=8.0) as session:
        step(session, model, 0)
        del model.head
        model.new_head = nn.Linear(8, 3)
        optimizer.add_param_group({"params": list(model.new_head.parameters())})
        before = model.new_head.weight.detach().clone()
        step(session, model, 1)
        assert not torch.equal(model.new_head.weight.float(), before.float())
        with session.full_precision():
            model(torch.randn(2, 6))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert list(map(type, model.modules())) == [Replaced, nn.Linear, nn.Linear]


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_module_that_two_rules_want_is_added(level: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = preamp.prepare(model, optimizer, policy=f"{level}; 0|x.* -> full; 3|.*y -> low")
    model.xy = nn.Linear(2, 2)
    optimizer.add_param_group({"params": list(model.xy.parameters())})
    with pytest.raises(PolicyError, match="'xy' matches several rules"), session.autocast():
        pass
    session.close()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert list(map(type, model.modules()))[1:3] == [nn.Linear, nn.LayerNorm]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_lazy_module_is_added(level: str, kind: str) -> None:
    model = mlp()
    optimizer = OPTIMIZERS[kind](model.parameters())
    with preamp.prepare(model, optimizer, level, scale=8.0) as session:
        step(session, model, 0)
        model.append(nn.LazyLinear(3))
        with session.full_precision():
            pass
        with session.autocast():
            model(torch.randn(2, 6))
        optimizer.add_param_group({"params": list(model[-1].parameters())})
        before = model[-1].weight.detach().clone()
        step(session, model, 1)
        assert not torch.equal(model[-1].weight.float(), before.float())
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_class_with_a_table_of_its_subclasses(level: str) -> None:
    table: dict[str, type] = {}

    class Listed(nn.Module):
        def __init_subclass__(cls, *, kind: str) -> None:
            assert kind not in table
            table[kind] = cls

    class Net(Listed, kind="net"):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(6, 3), nn.LayerNorm(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.layer(x))  # type: ignore[no-any-return]

    model = Net()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level, scale=8.0) as session:
        step(session, model, 0)
    assert table == {"net": Net}
    assert type(model) is Net


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_class_that_allows_no_subclass(level: str) -> None:
    class Final(type):
        def __new__(kind, name: str, bases: Any, body: Any) -> Any:
            if any(type(base) is Final for base in bases):
                raise TypeError("a final class")
            return super().__new__(kind, name, bases, body)

    class Last(nn.Module, metaclass=Final):
        forward = nn.Identity.forward

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("offset", torch.zeros(3))

    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3), nn.LayerNorm(3), Last())
    optimizer = OPTIMIZERS["torch"](model.parameters())
    before = seen(model, optimizer)
    with pytest.raises(TypeError, match="a final class"):
        preamp.prepare(model, optimizer, level, modules={"3": "full"})
    after = seen(model, optimizer)
    assert (after[0], [p[0] for p in after[1]], after[2:]) == (before[0], [p[0] for p in before[1]], before[2:])


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_region_that_is_entered_after_its_session(level: str) -> None:
    model = mlp()
    session = preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level)
    region = session.autocast()
    session.close()
    with pytest.raises(SessionError, match="closed"), region:
        pass
    assert not REGISTRY.stamp and not PRODUCTS._libraries and not torch.is_autocast_enabled("cpu")


class Counts(nn.Module):
    """Counts its calls in a buffer, which two of them may share."""

    def __init__(self, count: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("count", count)
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.layer(x)  # type: ignore[no-any-return]


@over(level=["O1", "O2", "O3", "O5"], dtype=[torch.float32, torch.float16])
def test_a_buffer_of_two_modules(level: str, dtype: torch.dtype) -> None:
    count = torch.zeros(2, dtype=dtype)
    model = nn.Sequential(Counts(count), Counts(count))
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level, scale=8.0) as session:
        step(session, model, 0)
        assert model[0].count.tolist() == model[1].count.tolist() == [2, 2]
        with session.full_precision():
            model(torch.randn(2, 6))
        step(session, model, 1)
    assert model[0].count is model[1].count is count
    assert count.tolist() == [6, 6] and count.dtype is dtype


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_is_copied_with_its_model(level: str, kind: str) -> None:
    model = mlp()
    optimizer = OPTIMIZERS[kind](model.parameters())
    with preamp.prepare(model, optimizer, level, scale=8.0) as session:
        step(session, model, 0)
        copies = [copy.deepcopy((model, optimizer)), copy.deepcopy((optimizer, model))[::-1]]
    for copied, stepping in copies:
        own = [p for group in stepping.param_groups for p in group["params"]]
        assert list(map(id, own)) == list(map(id, copied.parameters()))
        before = weights(copied)
        with preamp.prepare(copied, stepping, level, scale=8.0) as session:
            step(session, copied, 1)
        assert not same(before, weights(copied))


@over(level=["O1", "O2", "O4", "O5"])
def test_gradients_in_full_precision_of_what_only_the_optimizer_has(level: str) -> None:
    model, weight = mlp(), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), weight], 0.1)
    x = torch.randn(4, 6)
    with preamp.prepare(model, optimizer, level, scale=2.0**10) as session:
        with session.autocast():
            loss = (model(x).float().square().mean() * weight).square()
        session.backward(loss)
        assert weight.grad is not None
        before = weight.grad.clone()
        with session.full_precision():
            assert weight.grad is None
            (model(x).square().mean() * weight).backward()
        assert torch.equal(weight.grad, before)


class Locked(nn.Module):
    """Has something that cannot be copied, and says what is to be."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lock = nn.Linear(6, 3), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.layer(x)  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lock = threading.Lock()


@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_of_what_a_model_says_is_to_be_copied(level: str) -> None:
    model = Locked()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level, scale=8.0) as session:
        step(session, model, 0)
        copied = copy.deepcopy(model)
        x = torch.randn(2, 6)
        with session.full_precision():
            assert torch.equal(copied(x).float(), model(x)) or level == "O3"  # whose copies are 16-bit


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_state_that_torch_does_not_load(level: str) -> None:
    model = mlp()
    optimizer = OPTIMIZERS["torch"](model.parameters())
    with preamp.prepare(model, optimizer, level, scale=8.0) as session:
        step(session, model, 0)
        before = [p.dtype for p in model.parameters()]
        with pytest.raises(KeyError, match="state"):
            optimizer.load_state_dict({"param_groups": optimizer.state_dict()["param_groups"]})
        assert [p.dtype for p in model.parameters()] == before
        step(session, model, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_states_of_a_16_bit_model_follow_its_masters(dtype: torch.dtype) -> None:
    model = mlp(norm=False).to(dtype)
    optimizer = OPTIMIZERS["torch"](model.parameters())
    x = torch.randn(4, 6)
    level = "O2" if dtype is torch.float16 else "O5"
    for _ in range(2):
        with preamp.prepare(model, optimizer, level, scale=8.0) as session:
            step(session, model, 0)
            assert {state["exp_avg"].dtype for state in optimizer.state.values() if state} == {torch.float32}
        assert {state["exp_avg"].dtype for state in optimizer.state.values() if state} == {dtype}
        model(x.to(dtype)).float().square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_lost_session_may_end_in_the_middle_of_an_operator(level: str, outer: bool) -> None:
    """Of plain torch's, or of its own region's: the garbage collector runs at any line, also of a kernel of ours."""
    importlib.import_module("torch._dynamo")  # with which there are kernels for tracing, too
    gc.collect()  # those that other tests have lost
    model, twin, x = mlp(), mlp(), torch.randn(4, 6)
    lost = [preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level)]
    with lost[0].autocast():
        model(x)

    def collect(frame: Any, event: str, _: Any) -> None:
        if lost and event == "call" and frame.f_code.co_name in ("kernel", "product"):
            lost.clear()
            gc.collect()

    region = functools.partial(torch.autocast, "cpu", torch.bfloat16, enabled=outer)
    with region():
        sys.setprofile(collect)
        try:
            seen = twin(x)
        finally:
            sys.setprofile(None)
    assert not lost
    with region():
        assert torch.equal(seen, twin(x))
