"""What one may do to a torch optimizer between steps one may do to these: the next step is as torch's."""

from __future__ import annotations

import copy
import io
import pickle
from collections import defaultdict
from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

import preamp
from preamp import optim
from preamp.errors import OptimizerError

from ..releases import TORCH
from ..rows import check_rows, over
from .gradients import give

SHAPES = [(4,), (8, 8), (3, 5), (1,), (8, 8), ()]
KINDS: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 0.1}, "AdamW": {"lr": 0.1, "amsgrad": True}, "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adagrad": {"lr": 0.1},
}  # fmt: skip
EACH = pytest.mark.parametrize("kind", KINDS)


def first_name(optimizer: Optimizer) -> str:
    """Of a state like a parameter."""
    names = ("exp_avg", "momentum_buffer", "sum")
    return next(name for name in names if name in next(iter(optimizer.state.values())))


Change = Callable[[Any, list[Parameter]], Any]


def check_as_torchs(kind: str, *changes: Change, before: int = 6, after: int = 3) -> None:
    """Make each change to an optimizer of torch and to ours, between steps: parameters and states are then the same."""
    ends = []
    for ours in (False, True):
        torch.manual_seed(1)
        params = [Parameter(torch.randn(shape)) for shape in SHAPES]
        options = {} if ours else {"foreach": False}
        optimizer: Any = getattr(optim if ours else torch.optim, kind)(params, **KINDS[kind], **options)
        for seed in range(before):
            give(params, seed)
            optimizer.step()
        for number, change in enumerate(changes):
            made = change(optimizer, params)
            optimizer = made if isinstance(made, Optimizer) else optimizer
            params = [p for group in optimizer.param_groups for p in group["params"]]
            for seed in range(after):
                give(params, 100 * number + seed)
                optimizer.step()
        ends.append(([p.detach().clone() for p in params], [dict(optimizer.state.get(p, {})) for p in params]))
    (theirs, of_torch), (mine, own) = ends
    for i, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6, msg=f"parameter {i}")
    for a, b in zip(of_torch, own, strict=True):
        for name in a.keys() & b.keys() - {"note"}:
            torch.testing.assert_close(
                torch.as_tensor(b[name]), torch.as_tensor(a[name]), rtol=2e-5, atol=2e-6, check_dtype=False
            )


def pop(place: int) -> Change:
    return lambda optimizer, params: optimizer.state.pop(params[place])


def new_dict(optimizer: Any, params: list[Parameter]) -> None:
    optimizer.state = defaultdict(dict)


def empty_row(optimizer: Any, params: list[Parameter]) -> None:
    optimizer.state[params[2]] = {}


def plain_row(optimizer: Any, params: list[Parameter]) -> None:
    optimizer.state[params[1]] = dict(optimizer.state[params[1]])
    optimizer.state[params[1]][first_name(optimizer)] = torch.ones_like(params[1])


def replace(optimizer: Any, params: list[Parameter]) -> None:
    optimizer.state[params[2]][first_name(optimizer)] = torch.full_like(params[2], 0.5)


def replace_and_keep(optimizer: Any, params: list[Parameter]) -> None:
    optimizer.kept = optimizer.state[params[2]][first_name(optimizer)]
    optimizer.state[params[2]].update({first_name(optimizer): torch.full_like(params[2], 0.5)})


def swap(optimizer: Any, params: list[Parameter]) -> None:
    state = optimizer.state
    state[params[1]], state[params[4]] = state[params[4]], state[params[1]]


def through_data(optimizer: Any, params: list[Parameter]) -> None:
    state = optimizer.state[params[4]][first_name(optimizer)]
    state.data = torch.full_like(state, 0.25)


def through_data_and_keep(optimizer: Any, params: list[Parameter]) -> None:
    """As who puts states away for a while does."""
    state = optimizer.state[params[4]][first_name(optimizer)]
    optimizer.kept = state.data
    state.data = torch.full_like(state, 0.25)


def reset_step(optimizer: Any, params: list[Parameter]) -> None:
    if "step" in optimizer.state[params[3]]:
        optimizer.state[params[3]]["step"].zero_()


def add_steps(optimizer: Any, params: list[Parameter]) -> None:
    if "step" in optimizer.state[params[1]]:
        optimizer.state[params[1]]["step"] += 7


def replace_step(optimizer: Any, params: list[Parameter]) -> None:
    if "step" in optimizer.state[params[1]]:
        optimizer.state[params[1]]["step"] = optimizer.state[params[1]]["step"].clone()


def new_data(optimizer: Any, params: list[Parameter]) -> None:
    params[1].data = torch.ones_like(params[1])
    params[2].data = params[2].data.clone()


def transposed(optimizer: Any, params: list[Parameter]) -> None:
    params[1].data = params[1].data.t()


def new_parameter(optimizer: Any, params: list[Parameter]) -> None:
    """As code that grows models does: the state goes over to the new one."""
    old, new = params[1], Parameter(params[1].detach().clone() * 2)
    optimizer.param_groups[0]["params"][1] = new
    optimizer.state[new] = optimizer.state.pop(old)


def new_group(optimizer: Any, params: list[Parameter]) -> None:
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.003}


def hyper(**values: Any) -> Change:
    return lambda optimizer, params: optimizer.param_groups[0].update(values)


def notes(optimizer: Any, params: list[Parameter]) -> None:
    optimizer.state[params[0]]["note"] = "a wrapper's own"
    optimizer.state["all"] = {"k": 1}


def reloaded(optimizer: Any, params: list[Parameter]) -> None:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))


def swapped_for_an_average(optimizer: Any, params: list[Parameter]) -> None:
    kept = [p.data for p in params]
    for p in params:
        p.data = torch.zeros_like(p)
    for p, data in zip(params, kept, strict=True):
        p.data = data


CHANGES: dict[str, Change] = {
    "pop the first": pop(0), "pop another": pop(3), "a new dict": new_dict,
    "clear": lambda optimizer, params: optimizer.state.clear(),
    "an empty row": empty_row, "a plain row": plain_row, "replace": replace,
    "replace, keep the old": replace_and_keep, "swap": swap,
    "in place": lambda optimizer, params: optimizer.state[params[4]][first_name(optimizer)].mul_(0.5),
    "through data": through_data, "through data, and keep": through_data_and_keep,
    "turn a state": lambda optimizer, params: optimizer.state[params[1]][first_name(optimizer)].t_(),
    "reset a step": reset_step, "add to a step": add_steps,
    "replace a step": replace_step, "new data": new_data, "transposed": transposed, "a new parameter": new_parameter,
    "a group more": lambda optimizer, params: optimizer.add_param_group(
        {"params": [Parameter(torch.ones(3))], "lr": 0.01}
    ),
    "a group anew": new_group, "lr": hyper(lr=0.01), "decay": hyper(weight_decay=0.1),
    "notes": notes, "deepcopy": lambda optimizer, params: copy.deepcopy(optimizer),
    "pickle": lambda optimizer, params: pickle.loads(pickle.dumps(optimizer)), "reload": reloaded,
    "frozen": lambda optimizer, params: params[0].requires_grad_(False),
    "swapped": swapped_for_an_average,
}  # fmt: skip


@EACH
def test_changes_between_steps(kind: str) -> None:
    # torch's Adagrad makes its states when it is made, and has none once they are gone; before 2.7 none for a new group
    left_out = ["clear", "a new dict", "pop the first", "pop another", "an empty row"] if kind == "Adagrad" else []
    if kind == "Adagrad" and TORCH < (2, 7):
        left_out.append("a group more")
    check_rows(
        ((name, change) for name, change in CHANGES.items() if name not in left_out),
        lambda _, change: check_as_torchs(kind, change),
    )


@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_one_after_another(kind: str) -> None:
    order = ["replace", "deepcopy", "reset a step", "pop another", "pickle", "replace a step", "swapped", "swap", "lr"]
    check_as_torchs(kind, *(CHANGES[name] for name in order))


@pytest.mark.parametrize("start", [0.0, 0.9])
def test_momentum_comes_and_goes(start: float) -> None:
    momenta = [hyper(momentum=m) for m in (0.9, 0.0, 0.5, 0.0, 0.9)]
    check_as_torchs("SGD", hyper(momentum=start), *momenta, hyper(nesterov=True), hyper(nesterov=False, dampening=0.1))


def test_settings_of_adam_come_and_go() -> None:
    check_as_torchs("Adam", hyper(betas=(0.5, 0.6)), hyper(maximize=True), hyper(eps=1e-3), hyper(weight_decay=0.2))
    check_as_torchs("AdamW", hyper(amsgrad=False), hyper(amsgrad=True), hyper(betas=(0.2, 0.9)))


def test_amsgrad_switched_on() -> None:
    """With torch a KeyError; the largest second moment is the largest from now on."""
    params = [Parameter(torch.ones(4)), Parameter(torch.ones(3))]
    optimizer = optim.Adam(params, 0.1)
    for amsgrad in (False, True):
        optimizer.param_groups[0]["amsgrad"] = amsgrad
        give(params, 1)
        optimizer.step()
    row = optimizer.state[params[1]]
    assert torch.equal(row["max_exp_avg_sq"], row["exp_avg_sq"])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "SGD"])
def test_each_has_a_step_count_of_its_own(kind: str) -> None:
    params = [Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = getattr(optim, kind)(params)
    for seed in range(3):
        give(params, seed, lambda i, seed=seed: (i, seed) == (2, 1))
        optimizer.step()
        counts = [optimizer.state[p]["step"] for p in params]
        assert [c.item() for c in counts] == [seed + 1.0 - (i == 2 and seed > 0) for i in range(len(params))]
        assert len({id(c) for c in counts}) == len({c.data_ptr() for c in counts}) == len(params)
    optimizer.state[params[0]]["step"].fill_(9)
    assert [optimizer.state[p]["step"].item() for p in params] == [9, 3, 2, 3, 3, 3]
    give(params, 4)
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [10, 4, 3, 4, 4, 4]
    for step in (optimizer.state[p]["step"] for p in params):
        assert step.dtype is torch.float32 and step.dim() == 0
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    assert torch.load(saved, weights_only=True)["state"][0]["step"] == 10


def test_a_number_as_step_count() -> None:
    params = [Parameter(torch.ones(4)), Parameter(torch.ones(3))]
    optimizer = optim.Adam(params, 0.1)
    give(params, 0)
    optimizer.step()
    optimizer.state[params[1]]["step"] = 5
    give(params, 1)
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params] == [2, 6]


# -- two parameters over one memory


@over(kind=["Adam", "SGD"], dtype=[torch.float32, torch.bfloat16])
def test_two_parameters_over_one_memory(kind: str, dtype: torch.dtype) -> None:
    ends = []
    for lib in (torch.optim, optim):
        whole = torch.ones(12, dtype=dtype)
        a, b, c = Parameter(whole[:8]), Parameter(whole[4:]), Parameter(torch.ones(5, dtype=dtype))
        options: dict[str, Any] = {} if lib is optim else {"foreach": False}
        optimizer = getattr(lib, kind)([a, c, b], lr=0.0625, **options)
        for _ in range(10):
            for p in (a, b, c):
                p.grad = torch.ones_like(p)
            optimizer.step()
        ends.append([whole.clone(), c.detach().clone()])
        assert a.data_ptr() == whole.data_ptr()
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2 if dtype is torch.bfloat16 else 1e-6, atol=1e-6)


# -- shapes and dtypes


def stepped(kind: str, n: int) -> tuple[Any, list[Parameter]]:
    params = [Parameter(torch.zeros(n)) for _ in range(3)]
    optimizer = getattr(optim, kind)(params, **KINDS.get(kind, {}))
    give(params, 0)
    optimizer.step()
    return optimizer, params


LAYERS = ("LAMB", "NovoGrad")
SIZES = pytest.mark.parametrize("n", [3000, 40000])


def with_state(make: Callable[[Parameter], Any]) -> Change:
    return lambda optimizer, params: optimizer.state[params[1]].update({first_name(optimizer): make(params[1])})


def cut_state(optimizer: Any, params: list[Parameter]) -> None:
    state = optimizer.state[params[1]][first_name(optimizer)]
    state.data = torch.zeros(len(state) // 2)


def with_gradient(make: Callable[[Parameter], Any]) -> Change:
    def change(optimizer: Any, params: list[Parameter]) -> None:
        params[1].grad = make(params[1])

    return change


def resized(gradient: bool, length: Callable[[int], int]) -> Change:
    """After the backward pass."""

    def change(optimizer: Any, params: list[Parameter]) -> None:
        resized: Any = params[1].grad if gradient else params[1]
        resized.data = torch.zeros(length(len(params[1])))

    return change


HALF, TWICE = (lambda n: n // 2), (lambda n: 2 * n)
REFUSED: dict[str, Change] = {
    **{f"state of shape {s}": with_state(lambda p, s=s: torch.zeros(s)) for s in ((1,), (2,), (90000,), ())},
    **{f"{d} state": with_state(lambda p, d=d: torch.zeros(len(p), dtype=d))
       for d in (torch.bfloat16, torch.float64, torch.int64, torch.complex64)},
    "a number for a state": with_state(lambda p: 3.0),
    "sparse state": with_state(lambda p: torch.zeros(len(p)).to_sparse()),
    "state elsewhere": with_state(lambda p: torch.zeros(len(p), device="meta")), "state cut where it lies": cut_state,
    "sparse gradient": with_gradient(lambda p: torch.ones(len(p)).to_sparse()),
    **{f"{'gradient' if gradient else 'parameter'} {'cut' if length is HALF else 'grown'}": resized(gradient, length)
       for gradient in (True, False) for length in (HALF, TWICE)},
}  # fmt: skip


@SIZES
@pytest.mark.parametrize("kind", [*KINDS, *LAYERS])
def test_what_no_step_can_be_made_with_is_refused_and_nothing_stepped(kind: str, n: int) -> None:
    check_rows(REFUSED.items(), lambda what, change: check_refused(what, change, kind, n))


def check_refused(what: str, change: Change, kind: str, n: int) -> None:
    optimizer, params = stepped(kind, n)
    before = [p.detach().clone() for p in params]
    give(params, 1)
    change(optimizer, params)
    told = first_name(optimizer) if "state" in what else "sparse gradient" if what == "sparse gradient" else None
    with pytest.raises(OptimizerError, match=told):
        optimizer.step()
    assert all(map(torch.equal, params[::2], before[::2])), "nothing was stepped"
    if "state of shape" in what:
        saved = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(OptimizerError, match=told):
            optimizer.load_state_dict(saved)
    optimizer.state.pop(params[1])
    give(params, 1)
    optimizer.step()


@SIZES
def test_parameters_resized_in_place_with_room_behind(n: int) -> None:
    """The address stays, the memory is longer: only shapes tell."""
    room = torch.zeros(4 * n)
    params = [Parameter(room[:n]), Parameter(torch.zeros(n))]
    optimizer = optim.SGD(params, 0.1)
    for length in (n, 2 * n, 4 * n, n):
        params[0].data = room[:length]
        give(params, length)
        before = room[:length].clone()
        optimizer.step()
        assert torch.allclose(params[0].detach(), before - 0.1 * params[0].grad)


@over(kind=["AdamW", "SGD", "LAMB"], n=[20, 200])
def test_some_parameters_become_bfloat16(kind: str, n: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(n, n), nn.Linear(n, n), nn.Linear(n, 1))
    optimizer = getattr(optim, kind)(model.parameters(), lr=1e-3)
    for _ in range(3):
        give(list(model.parameters()), 0)
        optimizer.step()
        model[1].to(torch.bfloat16)
    for p in model[1].parameters():
        assert optimizer.state[p]["master"].dtype is torch.float32 and p.isfinite().all()
    assert all(p.isfinite().all() for p in model.parameters())


# -- gradients that are changed in step


def sign_(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.sign_()


def overridden(base: Any) -> Any:
    class Sign(base):
        def step(self, closure: Any = None) -> Any:
            sign_(self)
            return super().step(closure)

    return lambda params: Sign(params, lr=1.0)


def patched(base: Any, scheduled: str = "") -> Any:
    def make(params: Any) -> Any:
        optimizer = base(params, lr=1.0)
        if scheduled == "before":
            torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        old = optimizer.step

        @wraps(old)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            sign_(optimizer)
            return old(*args, **kwargs)

        optimizer.step = MethodType(step, optimizer)
        if scheduled == "after":
            torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        return optimizer

    return make


def hooked(base: Any) -> Any:
    def make(params: Any) -> Any:
        optimizer = base(params, lr=1.0)
        optimizer.register_step_pre_hook(lambda own, *_: sign_(own))
        return optimizer

    return make


WAYS = {
    "overridden": overridden, "patched": patched, "scheduler first": partial(patched, scheduled="before"),
    "scheduler last": partial(patched, scheduled="after"), "hook": hooked,
}  # fmt: skip


@over(way=WAYS, how=["alone", "O0", "O4", "O5", "torch's scaler", "preamp's scaler"], clip=[False, True])
def test_gradients_changed_in_step(way: str, how: str, clip: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer, x = WAYS[way](optim.SGD)(model.parameters()), torch.full((4, 3), 0.01)
    session = preamp.prepare(model, optimizer, level=how) if how.startswith("O") else None
    scaler = {"torch's scaler": torch.amp.GradScaler, "preamp's scaler": preamp.GradScaler}.get(how)
    scaling = scaler("cpu", init_scale=1024.0) if scaler else None
    for _ in range(3):
        before = model[1].bias.detach().float().clone()
        if session is not None:
            with session.autocast():
                loss = model(x).float().mean() * 0.01
            session.backward(loss)
            if clip:
                session.clip_grad_norm_(1e-4)
            session.step()
            session.zero_grad()
        else:
            loss = model(x).mean() * 0.01
            (loss if scaling is None else scaling.scale(loss)).backward()
            optimizer.step() if scaling is None else scaling.step(optimizer)
            if scaling is not None:
                scaling.update()
            optimizer.zero_grad()
        moved = model[1].bias.detach().float() - before
        assert abs(float(moved[0]) + 1) < 0.02
    if session is not None:
        session.close()


def test_a_scheduler_is_nobody_who_looks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which every training has: its wrapper only notes that a step was taken."""
    monkeypatch.setattr("preamp.optim._base._global_optimizer_pre_hooks", {})  # a session left open by others has one
    params = [Parameter(torch.ones(4)), Parameter(torch.ones(3))]
    optimizer = optim.SGD(params, 0.1)
    assert not optimizer.is_hooked
    for _ in range(2):
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        assert not optimizer.is_hooked
    old: Callable[..., Any] = optimizer.step
    optimizer.step = wraps(old)(lambda *args: old(*args))
    assert optimizer.is_hooked


def test_float16_gradients_in_a_step_of_ones_own() -> None:
    """They cannot be unscaled in place: torch's error, and no wrong step."""
    param = Parameter(torch.ones(4, dtype=torch.float16))
    optimizer, scaler = overridden(optim.SGD)([param]), preamp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((param.float() * 0.01).sum()).backward()
    with pytest.raises(ValueError, match="FP16"):
        scaler.step(optimizer)
    assert bool((param == 1).all())


@over(level=["O0", "O4", "O5"], kind=["Adam", "SGD"])
def test_steps_in_inference_mode(level: str, kind: str) -> None:
    """What a step makes is there for the next backward pass."""

    def run(inference: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        more = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(preamp.optim, kind)(model.parameters(), lr=0.1, **more)
        with preamp.prepare(model, optimizer, level=level) as session:
            for _ in range(3):
                with session.autocast():
                    loss = model(torch.ones(2, 4)).float().square().sum()
                session.backward(loss)
                with torch.inference_mode(inference):
                    session.step()
                    session.zero_grad()
        return [p.detach() for p in model.parameters()]

    assert all(map(torch.equal, run(True), run(False)))


@over(kind=KINDS, turned=[False, True])
def test_parameters_with_other_shapes_over_the_same_memory(kind: str, turned: bool) -> None:
    """A state of the old shape is an error, as in torch, or the entries in memory are stepped one by one as before."""
    values, grads = torch.randn(100, 80), torch.randn(100, 80)
    params = [Parameter(values.clone()) for _ in range(2)]
    one, other = (getattr(optim, kind)([param, Parameter(torch.ones(5))], **KINDS[kind]) for param in params)
    for _ in range(2):
        for param in params:
            param.grad = grads.clone()
        one.step()
        other.step()
    assert torch.equal(*params)
    given = params[1].detach().clone()
    params[1].data = params[1].data.t() if turned else params[1].data.view(80, 100)
    params[0].grad = grads.clone()
    params[1].grad = grads.t().contiguous() if turned else grads.view(80, 100).clone()
    one.step()
    try:
        other.step()
    except OptimizerError:
        assert torch.equal(params[1].data.t() if turned else params[1].data.view(100, 80), given)
    else:
        assert torch.equal(params[0], params[1].data.t() if turned else params[1].data.view(100, 80))


@pytest.mark.parametrize("which", ["parameter", "state", "master"])
def test_other_memory_dtype_or_order_between_two_steps(which: str) -> None:
    """A step trusts nothing that it saw the step before: it writes the memory that there is now."""
    for change in (
        lambda tensor: tensor.data.clone(),
        lambda tensor: tensor.data.t().contiguous().t(),
        lambda tensor: tensor.data.double() if which == "parameter" else tensor.data.clone(),
    ):
        low = which == "master"
        params = [Parameter(torch.ones(6, 6, dtype=torch.bfloat16 if low else torch.float32)) for _ in range(2)]
        optimizer = optim.SGD(params, 0.5, momentum=0.5)
        twin = torch.ones(6, 6, dtype=torch.float64)
        velocity = torch.zeros_like(twin)
        for step in range(4):
            if step == 2:
                row = optimizer.state[params[0]]
                tensor = {"parameter": params[0], "state": row["momentum_buffer"], "master": row.get("master")}[which]
                tensor.data = change(tensor)
            for param in params:
                param.grad = torch.arange(36.0).view(6, 6).to(param.dtype)
            velocity = 0.5 * velocity + torch.arange(36.0).view(6, 6)
            twin -= 0.5 * velocity
            try:
                optimizer.step()
            except OptimizerError:
                assert which == "parameter" and params[0].dtype is torch.float64
                break
            assert torch.equal(params[0].double(), twin.to(params[0].dtype).double())


@pytest.mark.parametrize(("master", "states"), [("float32", "float32"), ("split", "float32"), ("split24", "8bit")])
def test_a_master_that_is_laid_out_otherwise_is_stepped_entry_by_entry(master: str, states: str) -> None:
    """As `optimizer.state[p]["master"].data = ...` allows: the same numbers, in another order in memory."""
    ends = []
    for turned in (False, True):
        torch.manual_seed(0)
        param = Parameter(torch.randn(70, 70).bfloat16())
        optimizer = optim.AdamW([param], 0.1, master=master, states=states)
        for step in range(4):
            give([param], step)
            if turned and step == 2:
                kept = optimizer.state[param]["master" if master == "float32" else "master_bits"]
                kept.data = kept.data.t().contiguous().t()
            optimizer.step()
        ends.append(param.detach().clone())
    assert torch.equal(*ends)


@over(kind=["AdamW", "SGD", "Lion"], how=["in its place", "beside it", "within a function"])
def test_a_step_that_is_compiled_is_the_step(kind: str, how: str) -> None:
    weights = []
    for compiled in (False, True):
        param = torch.nn.Parameter(torch.ones(3))
        optimizer = getattr(optim, kind)([param], lr=0.1)
        step = optimizer.step
        if compiled:
            inner = step if how != "within a function" else lambda taken=step: taken()
            step = torch.compile(inner, backend="eager")
            if how == "in its place":
                optimizer.step = step
        for size in range(3):
            param.grad = torch.full((3,), size + 1.0)
            step()
        weights.append(param.detach().clone())
    assert torch.equal(*weights) and not torch.equal(weights[0], torch.ones(3))
