"""Options that no step can be made with: refused as an optimizer is made, gets a group, loads, or is prepared."""

from __future__ import annotations

import copy
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import preamp
from preamp import optim
from preamp.errors import OptimizerError, PolicyError
from preamp.optim import Adagrad, Adam, AdamW

from ..rows import check_rows
from ..session.toys import loss_of, mlp, same, weights

NAN, INFINITE = float("nan"), float("inf")
NUMBERS = {
    "AdamW": ("lr", "eps", "weight_decay"),
    "Adam": ("lr", "eps", "weight_decay"),
    "SGD": ("lr", "momentum", "weight_decay", "dampening"),
    "Adagrad": ("lr", "eps", "weight_decay", "lr_decay", "initial_accumulator_value"),
    "LAMB": ("lr", "eps", "weight_decay", "max_grad_norm"),
    "NovoGrad": ("lr", "eps", "weight_decay"),
    "Lion": ("lr", "weight_decay"),
    "Muon": ("lr", "eps", "weight_decay", "momentum", "ns_steps"),
}
FLAGS = {
    "AdamW": ("amsgrad", "maximize", "capturable"),
    "Adam": ("decoupled_weight_decay",),
    "SGD": ("nesterov", "maximize"),
    "LAMB": ("bias_correction", "grad_averaging", "adam_w_mode", "use_nvlamb"),
    "NovoGrad": ("init_zero", "reg_inside_moment"),
    "Muon": ("nesterov",),
}
REFUSED: list[tuple[str, str, Any]] = [
    *((kind, name, bad) for kind, names in NUMBERS.items() for name in names
      for bad in (NAN, INFINITE, "0.1", True, [0.1], torch.ones(2), 1j)),
    *((kind, name, -0.1) for kind, names in NUMBERS.items() for name in names if name != "dampening"),
    *((kind, name, None) for kind, names in NUMBERS.items() for name in names if name != "max_grad_norm"),
    *((kind, name, bad) for kind, names in FLAGS.items() for name in names for bad in ("yes", 2, 0.5, torch.ones(2))),
    *((kind, "betas", bad) for kind in ("AdamW", "Adam", "LAMB", "NovoGrad", "Lion")
      for bad in ((0.9,), (0.9, 0.9, 0.9), 0.9, (0.9, 1.0), (NAN, 0.9), ("a", "b"), (-0.1, 0.9), (True, 0.9), None)),
    *(("Muon", "momentum", bad) for bad in (1, 1.0, 1.5)),
    *(("Muon", "ns_steps", bad) for bad in (2.5, 5.0, 100, -1, torch.tensor(5))),
    *(("Muon", "ns_coefficients", bad) for bad in (3.4, (1.0, 2.0), (1.0, 2.0, NAN), ("a", 1.0, 2.0))),
    ("Muon", "adjust_lr_fn", "moonshot"), ("NovoGrad", "norm_type", 1),
]  # fmt: skip


def param() -> nn.Parameter:
    return nn.Parameter(torch.ones(2, 3))


@pytest.mark.parametrize("kind", NUMBERS)
def test_refused(kind: str) -> None:
    check_rows((row for row in REFUSED if row[0] == kind), refuses)


def refuses(kind: str, name: str, bad: Any) -> None:
    make = getattr(optim, kind)
    with pytest.raises(OptimizerError, match=name):
        make([param()], **{name: bad})
    with pytest.raises(OptimizerError, match=name):
        make([{"params": [param()], name: bad}])
    optimizer = make([param()])
    with pytest.raises(OptimizerError, match=name):
        optimizer.add_param_group({"params": [param()], name: bad})
    assert len(optimizer.param_groups) == 1
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0][name] = bad
    before = str(optimizer.state_dict())
    with pytest.raises(OptimizerError, match=name):
        optimizer.load_state_dict(state)
    assert str(optimizer.state_dict()) == before


def test_seeds_that_are_no_whole_numbers() -> None:
    def refused(bad: Any) -> None:
        with pytest.raises(OptimizerError, match="seed"):
            optim.AdamW([param()], seed=bad)

    check_rows([0.5, "3", NAN, None, True, torch.tensor(3)], refused)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("AdamW", {"lr": torch.tensor(0.1), "betas": (torch.tensor(0.9), torch.tensor(0.99))}),
        ("AdamW", {"lr": numpy.float32(0.1), "weight_decay": numpy.int64(0), "betas": [0, 0.9]}),
        ("SGD", {"lr": torch.tensor([0.1]), "momentum": 1, "dampening": -0.5}),
        ("LAMB", {"max_grad_norm": None, "bias_correction": 1}),
        ("Muon", {"lr": torch.tensor(0.1), "ns_steps": numpy.int64(3), "momentum": 0}),
        ("Lion", {"betas": (0.0, 0.0)}),
    ],
    ids=str,
)
def test_taken(kind: str, options: dict[str, Any]) -> None:
    p = param()
    optimizer = getattr(optim, kind)([p], **options)
    before: Tensor = p.detach().clone()
    p.grad = torch.arange(6.0).view(2, 3) - 2.5
    optimizer.step()
    assert p.isfinite().all() and not torch.equal(p, before)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


# -- weights of 16 bits, and levels


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_in_tensors_and_flags_as_numbers(kind: str) -> None:
    """torch takes them; its fused kernels do not."""
    made: Any = getattr(optim, kind)
    defaults = made([param()]).defaults

    def options(convert: bool) -> dict[str, Any]:
        given = {n: v for n, v in defaults.items() if n not in ("ns_steps", "norm_type", "ns_coefficients", "fused")}
        given.update({"momentum": 0.9} if "momentum" in given else {})
        given = {n: v for n, v in given.items() if isinstance(v, (float, bool, tuple)) and n != "differentiable"}
        given.pop("decoupled_weight_decay", None)
        if convert:
            kinds: dict[type, Any] = {float: torch.tensor, bool: int, tuple: lambda v: tuple(map(torch.tensor, v))}
            return {n: kinds[type(v)](v) for n, v in given.items()}
        return given

    ends = []
    for convert in (True, False):
        p = param()
        optimizer = made([p], **options(convert))
        for step in range(3):
            p.grad = torch.tensor([[0.1, -0.2, 0.3], [0.4, 0.5, -0.6]]) * (step + 1)
            optimizer.step()
        ends.append(p.detach().clone())
    torch.testing.assert_close(*ends, rtol=1e-2, atol=1e-6)
    assert not torch.equal(ends[0], torch.ones(2, 3))


def test_what_weights_of_16_bits_do_not_take() -> None:
    with pytest.raises(OptimizerError, match="Adagrad with master='split'"):
        Adagrad([Parameter(torch.ones(2))], master="split")
    with pytest.raises(OptimizerError, match="master=None"):
        Adam([Parameter(torch.ones(2))], rounding="stochastic")
    half = Parameter(torch.ones(2, dtype=torch.float16))
    half.grad = torch.ones_like(half)
    with pytest.raises(OptimizerError, match="float16"):
        Adam([half], master="split").step()
    model = mlp()
    before = weights(model)
    with pytest.raises(PolicyError, match="level='O5'"):
        preamp.prepare(model, Adam(model.parameters(), master="split"), level="O2")
    assert same(weights(model), before)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_do_not_take_the_place_of_stochastic_rounding(level: str) -> None:
    """Nobody would notice that the rounding is not used, but for the memory."""
    model = mlp()
    optimizer = AdamW(model.parameters(), master=None, rounding="stochastic")
    with pytest.raises(PolicyError, match="O5,masters=no"):
        preamp.prepare(model, optimizer, level=level)
    assert all(p.dtype is torch.float32 for p in model.parameters())
    with preamp.prepare(model, optimizer, policy="O5,masters=no") as session:
        session.backward(loss_of(model, 0))
        session.step()
        assert not session.state_dict()["masters"] and not [s for s in optimizer.state.values() if "master" in s]
