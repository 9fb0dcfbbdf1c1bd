"""What every optimizer of preamp does alike: saved, copied, under a scaler, with split masters and without masters."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import preamp
from preamp.kernels import join
from preamp.optim import LAMB, SGD, Adagrad, AdamW, Lion, Muon, NovoGrad

from ..session.toys import same
from .gradients import everything, give, run

BF16 = torch.bfloat16
MAKERS: dict[str, Callable[..., Any]] = {
    "AdamW": partial(AdamW, lr=1e-2), "Lion": partial(Lion, lr=1e-3), "Muon": partial(Muon, lr=1e-2),
    "AdamW, 8 bits": partial(AdamW, lr=1e-2, states="8bit"), "SGD": partial(SGD, lr=1e-2, momentum=0.9),
}  # fmt: skip
MASTERS: dict[str, dict[str, Any]] = {
    "float32": {}, "split": {"master": "split"}, "24 bits": {"master": "split24"},
    "by chance": {"master": None, "rounding": "stochastic"},
    "none": {"master": None},
}  # fmt: skip
OTHERS: dict[str, Callable[..., Any]] = {
    "Adagrad": partial(Adagrad, lr=1e-2), "LAMB": partial(LAMB, lr=1e-2),
    "LAMB, no limit": partial(LAMB, lr=1e-2, weight_decay=0.0, max_grad_norm=None),
    "NovoGrad": partial(NovoGrad, lr=1e-2, weight_decay=0.1),
}  # fmt: skip
EVERY = [*((name, masters) for name in MAKERS for masters in MASTERS), *((name, "float32") for name in OTHERS)]
EACH = pytest.mark.parametrize(("name", "masters"), EVERY)
IN_BOTH = [*((*each, BF16) for each in EVERY), *((*each, torch.float32) for each in EVERY if each[1] == "float32")]


def made(name: str, dtype: torch.dtype = BF16) -> list[Parameter]:
    """Muon's are matrices; others are of any layout, with moments in 8 bits and too small for them."""
    torch.manual_seed(5)
    if name == "Muon":
        values = [torch.randn(shape) for shape in ((8, 16), (16, 8), (8, 16), (5, 5), (3, 1))]
    else:
        image = torch.randn(16, 12, 5, 5).to(memory_format=torch.channels_last)
        values = [torch.randn(70, 90), torch.randn(7, 1), image, *(torch.randn(n) for n in (4095, 4096, 0))]
    return [Parameter(each.to(dtype)) for each in values]


def make(name: str, params: list[Parameter], masters: str = "float32") -> Any:
    return {**MAKERS, **OTHERS}[name](params, **MASTERS[masters])


@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle"])
@pytest.mark.parametrize(("name", "masters", "dtype"), IN_BOTH, ids=str)
def test_going_on(name: str, masters: str, dtype: torch.dtype, way: str) -> None:
    params = made(name, dtype)
    optimizer = make(name, params, masters)
    run(optimizer, params, range(5))
    if way == "state_dict":
        twins = [Parameter(p.detach().clone()) for p in params]
        twin = make(name, twins, masters)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        twin.load_state_dict(torch.load(file, weights_only=True))
    else:
        twin = copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
        twins = twin.param_groups[0]["params"]
        assert all(a is not b for a, b in zip(params, twins, strict=True))
    assert same(everything(params, optimizer), everything(twins, twin))
    run(optimizer, params, range(5, 10)), run(twin, twins, range(5, 10))
    assert same(everything(params, optimizer), everything(twins, twin))


@EACH
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, preamp.GradScaler])
def test_under_a_scaler(name: str, masters: str, kind: type[torch.amp.GradScaler]) -> None:
    """Scaled gradients come to the same as true ones, and a bad step changes nothing."""
    plain, scaled = made(name), made(name)
    one, two = make(name, plain, masters), make(name, scaled, masters)
    scaler = kind("cpu", init_scale=2.0**10)
    for step in range(6):
        give(plain, step)
        scaler.scale(torch.zeros(()))
        for gradient in give(scaled, step):
            gradient.mul_(scaler.get_scale())
        if step == 3:
            scaled[1].grad[2, 0] = float("nan")  # type: ignore[index]
        else:
            one.step()
        scaler.step(two)
        scaler.update()
    assert same(everything(plain, one), everything(scaled, two))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("AdamW", {"amsgrad": True, "maximize": True}), *(("AdamW", {"weight_decay": d}) for d in (0.0, 0.1)),
     ("Lion", {}), ("Muon", {}), ("SGD", {"nesterov": True})],
    ids=str,
)  # fmt: skip
def test_split_masters_are_float32_masters_bit_for_bit(name: str, arguments: dict[str, Any]) -> None:
    params, twins = made(name), made(name)
    split, whole = MAKERS[name](params, master="split", **arguments), MAKERS[name](twins, **arguments)
    run(split, params, range(100)), run(whole, twins, range(100))
    expected = [whole.state[p]["master"] for p in twins]
    assert same([join(p.detach(), split.state[p]["master_bits"]) for p in params], expected)
    for p, master in zip(params, expected, strict=True):
        assert ((p.detach().float() - master).abs() <= (p.detach().float().abs() * 2.0**-8)).all()


@pytest.mark.parametrize("name", ["AdamW", "Lion", "Muon", "SGD"])
def test_small_updates_are_not_lost(name: str) -> None:
    """Without masters, rounding to nearest loses updates below half of a weight's spacing; by chance it does not.

    Nor do masters of 24 bits lose updates that are below half of their own spacing, 2^-15.
    """
    ends = {}
    for masters, arguments in MASTERS.items():
        weight = Parameter(torch.full((32, 32), 1.0, dtype=BF16))
        optimizer = MAKERS[name]([weight], **{**arguments, "lr": 2e-5 if name == "SGD" else 2e-4, "weight_decay": 0.0})
        torch.manual_seed(0)
        direction = torch.randn(32, 32).to(BF16)
        for _ in range(60):
            weight.grad = direction.clone()
            optimizer.step()
        ends[masters] = optimizer.state[weight].get("master", weight).detach().float() - 1
    length = float((ends["float32"] * ends["float32"]).sum())
    assert float((ends["none"] * ends["float32"]).sum()) < 0.1 * length
    assert float((ends["by chance"] * ends["float32"]).sum()) == pytest.approx(length, rel=0.1)
    for masters in ("float32", "24 bits"):
        weight = Parameter(torch.full((64, 64), 1.0, dtype=BF16))
        rate = {"Muon": 1e-4, "SGD": 4e-7}.get(name, 2e-6)
        optimizer = MAKERS[name]([weight], **{**MASTERS[masters], "lr": rate, "weight_decay": 0.0})
        for _ in range(60):
            weight.grad = torch.ones_like(weight).mul_(0.5)
            optimizer.step()
        state = optimizer.state[weight]
        ends[masters] = state["master"] if "master" in state else join(weight.detach(), state["master_bits"])
    moved, wanted = (float(ends[masters].double().mean() - 1) for masters in ("24 bits", "float32"))
    assert abs(wanted) > 0 and moved == pytest.approx(wanted, rel=0.15)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "AdamW, 8 bits"])
def test_masters_of_one_form_load_into_another(name: str) -> None:
    """Float32, the 16 bits that a weight lacks, or 8 of them: what is saved in one form goes on in each."""
    forms = ("float32", "split", "24 bits")

    def value(optimizer: Any, p: Parameter) -> torch.Tensor:
        state = optimizer.state[p]
        return state["master"] if "master" in state else join(p.detach(), state["master_bits"])

    for mine in forms:
        params = made(name)
        optimizer = make(name, params, mine)
        run(optimizer, params, range(5))
        saved = copy.deepcopy(optimizer.state_dict())
        for theirs in forms:
            twins = [Parameter(p.detach().clone()) for p in params]
            twin = make(name, twins, theirs)
            twin.load_state_dict(copy.deepcopy(saved))
            for p, q in zip(params, twins, strict=True):
                wanted, found = value(optimizer, p), value(twin, q)
                tolerance = 2.0**-16 if theirs == "24 bits" else 0.0
                assert bool(((found - wanted).abs() <= tolerance * wanted.abs() + 1e-40).all()), (mine, theirs)
                assert torch.equal(q.detach().float(), found.to(BF16).float()) or theirs != "float32"
                assert set(twin.state[q]) - {"step"} == set(make_state(name, q, theirs)) - {"step"}, (mine, theirs)
            run(twin, twins, range(5, 7))


def make_state(name: str, like: Parameter, masters: str) -> dict[str, Any]:
    """The states that an optimizer makes for such a parameter."""
    param = Parameter(like.detach().clone())
    optimizer = make(name, [param], masters)
    run(optimizer, [param], [0])
    return dict(optimizer.state[param])


@pytest.mark.parametrize("name", MAKERS)
def test_chance_can_be_repeated(name: str) -> None:
    ends = []
    for seed in (1, 1, 2):
        params = made(name)
        run(MAKERS[name](params, master=None, rounding="stochastic", seed=seed), params, range(5))
        ends.append([p.detach() for p in params])
    assert same(ends[0], ends[1]) and not same(ends[0], ends[2])
