"""Apex's fused optimizers: against torch.optim and plain maths, their state formats, and what users do to them."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from preamp.compat.apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)

from ..kernels import plain
from .toys import through_a_file

SHAPES = [(33, 17), (129,), (1,), (), (0,), (4, 3, 5, 5)]
ITERATIONS = 7

EVERY: dict[str, Callable[..., Any]] = {
    "adam": FusedAdam,
    "adam-capturable": lambda params, **k: FusedAdam(params, capturable=True, **k),
    "adam-masters": lambda params, **k: FusedAdam(params, master_weights=True, **k),
    "sgd": lambda params, **k: FusedSGD(params, **{"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, **k}),
    "lamb": FusedLAMB,
    "novograd": FusedNovoGrad,
    "adagrad": FusedAdagrad,
    "mixed-lamb": FusedMixedPrecisionLamb,
    "mixed-lamb-bf16": lambda params, **k: FusedMixedPrecisionLamb(
        params, reduced_precision_dtype=torch.bfloat16, **k
    ),
}  # fmt: skip

every = pytest.mark.parametrize("name", EVERY)


def tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.rand(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give_grads(params: list[Parameter], seed: int, *others: list[Parameter]) -> None:
    generator = torch.Generator().manual_seed(seed)
    for i, param in enumerate(params):
        param.grad = (torch.rand(param.shape, generator=generator) - 0.3).to(param.dtype)
        for other in others:
            other[i].grad = param.grad.to(other[i].dtype)


def distance(left: list[Any], right: list[Any]) -> float:
    gaps = (a.detach().double() - b.detach().double() for a, b in zip(left, right, strict=True) if a.numel())
    return max(float(gap.abs().max()) for gap in gaps)


def values(params: list[Parameter]) -> list[Tensor]:
    return [param.detach().clone() for param in params]


def assert_same_bits(left: list[Any], right: list[Any]) -> None:
    for a, b in zip(left, right, strict=True):
        assert a.dtype is b.dtype
        assert torch.equal(a, b)


# -- against torch.optim and the papers

ADAM: dict[str, Any] = {"lr": 5e-3, "betas": (0.6, 0.9), "eps": 3e-6, "weight_decay": 0.1}
GRAD = {"lr": 0.05, "eps": 1e-8, "weight_decay": 0.1}
SGD: list[dict[str, Any]] = [
    {}, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.3}, {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "weight_decay": 0.1}, {"weight_decay": 0.1},
]  # fmt: skip
TORCHS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "adam": (lambda p: FusedAdam(p, adam_w_mode=False, **ADAM), lambda p: torch.optim.Adam(p, **ADAM)),
    "adamw": (lambda p: FusedAdam(p, **ADAM), lambda p: torch.optim.AdamW(p, **ADAM)),
    "adamw, captured": (lambda p: FusedAdam(p, capturable=True, **ADAM), lambda p: torch.optim.AdamW(p, **ADAM)),
    "adagrad": (lambda p: FusedAdagrad(p, **GRAD), lambda p: torch.optim.Adagrad(p, **GRAD)),
    **{
        f"sgd {o}": (lambda p, o=o: FusedSGD(p, lr=0.1, **o), lambda p, o=o: torch.optim.SGD(p, lr=0.1, **o))
        for o in SGD
    },
}


@pytest.mark.parametrize("name", TORCHS)
def test_steps_are_torchs(name: str) -> None:
    mine, theirs = tensors(), tensors()
    fused, reference = TORCHS[name][0](mine), TORCHS[name][1](theirs)
    for i in range(ITERATIONS):
        give_grads(theirs, i, mine)
        reference.step()
        fused.step()
        assert distance(mine, theirs) < 1e-6
    if "adam" in name:
        assert int(fused.param_groups[0]["step"]) == ITERATIONS


def against(formula: Any, params: list[Parameter], fused: Any, options: dict[str, Any]) -> Any:
    """Steps of both."""
    reference = formula(list(params), {"maximize": False, "lr_decay": 0.0, **options})
    for i in range(ITERATIONS):
        give_grads(params, i)
        reference.step([p.grad for p in params])
        fused.step()
    return reference


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_adam_rounds_once_a_step(dtype: torch.dtype) -> None:
    """Each step is the float32 step of the 16-bit weight, with float32 moments, rounded."""
    mine = tensors(dtype)
    fused = FusedAdam(mine, lr=1e-2, weight_decay=0.1)
    wide = [Parameter(p.detach().float()) for p in mine]
    reference = torch.optim.AdamW(wide, lr=1e-2, weight_decay=0.1)
    for i in range(ITERATIONS):
        give_grads(mine, i, wide)
        reference.step()
        fused.step()
        with torch.no_grad():
            for param in wide:
                param.copy_(param.to(dtype))
    assert distance(mine, wide) <= 2 * torch.finfo(dtype).eps  # a tie may fall either way
    assert fused.state[mine[0]]["exp_avg"].dtype is torch.float32


@pytest.mark.parametrize("capturable", [False, True])
def test_groups_of_masters_hold_the_masters(capturable: bool) -> None:
    params = tensors(torch.float16)
    fused = FusedAdam(params, master_weights=True, capturable=capturable)
    give_grads(params, 0)
    fused.step()
    groups = fused.param_groups_master
    assert groups is not None
    assert groups[0]["params"][0] is fused.state[params[0]]["master"]


flag = st.booleans()


@settings(max_examples=25, deadline=None)
@given(
    bias_correction=flag, grad_averaging=flag, adam_w_mode=flag, use_nvlamb=flag, mixed=flag,
    weight_decay=st.sampled_from([0.0, 0.01]), max_grad_norm=st.sampled_from([0.0, 1.0, 100.0]),
)  # fmt: skip
def test_lamb_is_the_papers(mixed: bool, **options: Any) -> None:
    params = tensors()
    options = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, **options}
    fused = FusedMixedPrecisionLamb(params, **options) if mixed else FusedLAMB(params, **options)
    assert distance(params, against(plain.Lamb, params, fused, options).params) < 2e-5
    assert int(fused.param_groups[0]["step"]) == ITERATIONS


@settings(max_examples=25, deadline=None)
@given(bias_correction=flag, grad_averaging=flag, reg_inside_moment=flag, init_zero=flag,
       norm_type=st.sampled_from([0, 2]), weight_decay=st.sampled_from([0.0, 0.01]))  # fmt: skip
def test_novograd_is_the_papers(**options: Any) -> None:
    params = tensors()
    options = {"lr": 1e-2, "betas": (0.95, 0.98), "eps": 1e-8, **options}
    fused = FusedNovoGrad(params, **options)
    reference = against(plain.NovoGrad, params, fused, options)
    assert distance(params, reference.params) < 2e-5
    for p, norm in zip(params, reference.states["v"], strict=True):
        assert not p.numel() or float(fused.state[p]["norm"]) == pytest.approx(float(norm), rel=1e-5)


def test_adam_without_bias_correction() -> None:
    params = tensors()
    fused = FusedAdam(params, lr=1e-2, bias_correction=False, weight_decay=0.1)
    wide = [p.detach().double() for p in params]
    m, v = ([torch.zeros_like(p) for p in wide] for _ in range(2))
    for t in range(ITERATIONS):
        give_grads(params, t)
        for i, param in enumerate(params):
            assert param.grad is not None
            g = param.grad.double()
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.999 * v[i] + 0.001 * g**2
            wide[i] = wide[i] * (1 - 1e-3) - 1e-2 * m[i] / (v[i].sqrt() + 1e-8)
        fused.step()
    assert distance(params, wide) < 1e-5


# -- every optimizer


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("way", ["state", "file", "deepcopy", "pickle"])
def test_a_resumed_optimizer_goes_on_to_the_same_bits(name: str, dtype: torch.dtype, way: str) -> None:
    params = tensors(dtype)
    first = EVERY[name](params)
    for i in range(3):
        give_grads(params, i)
        first.step()
    if way == "deepcopy":
        second = copy.deepcopy(first)
    elif way == "pickle":
        second = pickle.loads(pickle.dumps(first))
    else:
        second = EVERY[name]([Parameter(value) for value in values(params)])
        state = first.state_dict()
        second.load_state_dict(through_a_file(state) if way == "file" else state)
    others = second.param_groups[0]["params"]
    for i in range(3, 6):
        give_grads(params, i, others)
        first.step()
        second.step()
        assert_same_bits(values(params), values(others))


@every
def test_nothing_to_step(name: str) -> None:
    params = tensors()
    fused = EVERY[name](params)
    before = values(params)
    assert fused.step() is None
    assert_same_bits(values(params), before)
    fused.add_param_group({"params": []})
    give_grads(params, 0)
    params[1].grad = None
    fused.step()
    assert torch.equal(params[1], before[1])
    assert not torch.equal(params[0], before[0])


@every
def test_a_late_parameter_starts_like_any_other(name: str) -> None:
    params = tensors()
    fused = EVERY[name](params)
    give_grads(params, 0)
    late, before = params[1], params[1].detach().clone()
    late.grad = None
    fused.step()
    give_grads(params, 1)
    fused.step()
    moved = (late.detach() - before).abs().max()
    assert 0 < float(moved) < 2.0  # NovoGrad divided by a norm of 0 would fly away


@every
def test_zero_grad_takes_an_argument_or_none(name: str) -> None:
    params = tensors()
    fused = EVERY[name](params)
    for argument in ({"set_to_none": False}, {"set_to_none": True}, {}):
        give_grads(params, 0)
        fused.zero_grad(**argument)
        none = argument.get("set_to_none", fused.set_grad_none)
        assert all((p.grad is None) if none else not p.grad.any() for p in params)  # type: ignore[union-attr]


# -- refusals, attributes, formats

NOT_HERE = {
    "amsgrad": (FusedAdam, FusedLAMB, FusedNovoGrad, FusedMixedPrecisionLamb), "adagrad_w_mode": (FusedAdagrad,),
    "wd_after_momentum": (lambda params, **k: FusedSGD(params, 0.1, **k),),
}  # fmt: skip


@pytest.mark.parametrize("option", NOT_HERE)
def test_options_that_nobody_uses_are_refused(option: str) -> None:
    for kind in NOT_HERE[option]:
        with pytest.raises(RuntimeError, match=rf"{option}=True\) is not here"):
            kind(tensors(), **{option: True})
        kind(tensors(), **{option: False})


def test_sgd_asks_for_a_learning_rate() -> None:
    with pytest.raises(ValueError, match="lr"):
        FusedSGD(tensors())
    FusedSGD([{"params": tensors(), "lr": 0.1}])


def test_signatures_are_apexs() -> None:
    expected = {
        FusedSGD: "params lr momentum dampening weight_decay nesterov wd_after_momentum materialize_master_grads "
                  "set_grad_none",
        FusedAdam: "params lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none capturable "
                   "master_weights",
        FusedLAMB: "params lr bias_correction betas eps weight_decay amsgrad adam_w_mode grad_averaging set_grad_none "
                   "max_grad_norm use_nvlamb",
        FusedNovoGrad: "params lr bias_correction betas eps weight_decay amsgrad reg_inside_moment grad_averaging "
                       "norm_type init_zero set_grad_none",
        FusedAdagrad: "params lr eps weight_decay set_grad_none adagrad_w_mode",
        FusedMixedPrecisionLamb: "params lr step bias_correction betas eps weight_decay amsgrad adam_w_mode "
                                 "grad_averaging max_grad_norm use_nvlamb reduced_precision_dtype",
    }  # fmt: skip
    for kind, names in expected.items():
        assert list(inspect.signature(kind).parameters) == names.split()


@pytest.mark.parametrize(("name", "states"), [
    ("adam", {"exp_avg", "exp_avg_sq"}), ("lamb", {"exp_avg", "exp_avg_sq"}), ("novograd", {"exp_avg", "norm"}),
    ("adagrad", {"sum"}), ("sgd", {"momentum_buffer"}),
])  # fmt: skip
def test_state_formats(name: str, states: set[str]) -> None:
    params = tensors()
    fused = EVERY[name](params)
    give_grads(params, 0)
    fused.step()
    assert set(fused.state[params[0]]) == states


def test_attributes() -> None:
    assert FusedAdam(tensors()).adam_w_mode == 1
    sgd = FusedSGD(tensors(), 0.1)
    assert sgd.materialize_master_grads
    assert not sgd.wd_after_momentum
    assert not sgd.set_grad_none


def test_state_of_a_capturable_adam_fits_a_plain_one() -> None:
    params = tensors()
    captured = FusedAdam(params, capturable=True)
    for i in range(3):
        give_grads(params, i)
        captured.step()
    assert captured.param_groups[0]["step"].dtype is torch.int32
    plain = FusedAdam(tensors())
    plain.load_state_dict(captured.state_dict())
    assert plain.param_groups[0]["step"] == 3
    again = FusedAdam(tensors(), capturable=True)
    again.load_state_dict(plain.state_dict())
    assert again.param_groups[0]["step"].tolist() == [3]


def test_a_loaded_state_is_nobody_elses() -> None:
    params, other_params = tensors(), tensors()
    fused, other = FusedAdam(params), FusedAdam(other_params)
    give_grads(params, 0)
    fused.step()
    other.load_state_dict(fused.state_dict())
    assert other.state[other_params[0]]["exp_avg"].data_ptr() != fused.state[params[0]]["exp_avg"].data_ptr()


def test_16_bit_states_of_an_old_checkpoint_are_widened() -> None:
    params = tensors(torch.float16)
    fused = FusedLAMB(params)
    give_grads(params, 0)
    fused.step()
    state = copy.deepcopy(fused.state_dict())
    for own in state["state"].values():
        own["exp_avg"] = own["exp_avg"].half()
    other_params = tensors(torch.float16)
    other = FusedLAMB(other_params)
    other.load_state_dict(state)
    assert other.state[other_params[0]]["exp_avg"].dtype is torch.float32


# -- GradScaler


@pytest.mark.parametrize("make", [
    lambda p: FusedAdam(p), lambda p: FusedAdam(p, capturable=True), lambda p: FusedMixedPrecisionLamb(p),
], ids=["adam", "capturable", "mixed-lamb"])  # fmt: skip
@pytest.mark.parametrize("unscale_first", [False, True])
def test_grad_scaler_skips_and_unscales(make: Any, unscale_first: bool) -> None:
    mine, theirs = tensors(), tensors()
    fused, reference = make(mine), make(theirs)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for i in range(5):
        give_grads(mine, i, theirs)
        scaler.scale(torch.ones(()))
        scale = scaler.get_scale()
        for param in mine:
            param.grad = param.grad * scale if param.grad is not None else None
        if i == 2:
            assert mine[0].grad is not None
            mine[0].grad[0, 0] = float("inf")
        else:
            reference.step()
        if unscale_first:
            scaler.unscale_(fused)
        scaler.step(fused)
        scaler.update()
        assert int(fused.param_groups[0]["step"]) == (i + 1 if i < 2 else i)
    assert scaler.get_scale() == 2.0**9
    assert distance(mine, theirs) < 1e-6


def test_groups_of_a_mixed_precision_lamb_share_no_tensor() -> None:
    fused = FusedMixedPrecisionLamb([{"params": [p]} for p in tensors()], step=4)
    first, second = fused.param_groups[:2]
    assert first["lr"] is not second["lr"]
    assert first["step"].data_ptr() != second["step"].data_ptr()
    assert first["step"].tolist() == [4]


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (FusedAdam, torch.optim.AdamW, {}),
        (FusedSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (FusedAdagrad, torch.optim.Adagrad, {}),
    ],
)
def test_a_state_of_torchs_own_optimizer_goes_on(ours: Any, theirs: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    reference = Parameter(torch.randn(3, 4))
    before = theirs([reference], **options)
    for _ in range(3):
        reference.grad = torch.randn(3, 4)
        before.step()
    parameter = Parameter(reference.detach().clone())
    after = ours([parameter], **options)
    after.load_state_dict(before.state_dict())
    for _ in range(3):
        reference.grad = torch.randn(3, 4)
        parameter.grad = reference.grad.clone()
        before.step()
        after.step()
        torch.testing.assert_close(parameter, reference)
