"""LARC against the formula of You et al. 2017, written out one parameter at a time in float64."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from preamp.compat.apex.parallel import LARC


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(4, 3), (3,), (), (2, 2, 2)]
    made = [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in shapes]
    made.append(nn.Parameter(torch.zeros(3, dtype=dtype)))  # norm 0
    return made


def give_gradients(params: list[nn.Parameter], seed: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator, dtype=torch.float64) * size).to(p.dtype)
    params[1].grad = torch.zeros_like(params[1])  # a gradient of norm 0
    params[2].grad = None


def rescaled(
    w: torch.Tensor, g: torch.Tensor, lr: float, decay: float, trust: float, clip: bool, eps: float
) -> torch.Tensor:
    w, g = w.double(), g.double()
    weight_norm, grad_norm = float(w.square().sum().sqrt()), float(g.square().sum().sqrt())
    if weight_norm == 0 or grad_norm == 0:
        return g
    rate = trust * weight_norm / (grad_norm + decay * weight_norm + eps)
    if clip:
        rate = 1.0 if lr == 0 else min(rate / lr, 1.0)
    return (g + decay * w) * rate


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])  # small gradients are clipped, large ones are not
def test_follows_the_formula(decay: float, clip: bool, size: float) -> None:
    params, plain = parameters(), parameters()
    larc = LARC(torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=decay), 0.02, clip, 1e-6)
    sgd = torch.optim.SGD(plain, lr=0.1, momentum=0.9)
    for step in range(3):
        give_gradients(params, step, size)
        give_gradients(plain, step, size)
        held = [p.grad for p in params]
        for p in plain:
            if p.grad is not None:
                p.grad.copy_(rescaled(p.detach(), p.grad, 0.1, decay, 0.02, clip, 1e-6))
        larc.step()
        sgd.step()
        assert all(p.grad is g for p, g in zip(params, held, strict=True))  # rescaled in place
        for p, want in zip(params, plain, strict=True):
            torch.testing.assert_close(p.grad, want.grad, rtol=1e-12, atol=1e-15)
            torch.testing.assert_close(p, want, rtol=1e-12, atol=1e-15)
    assert larc.param_groups[0]["weight_decay"] == decay


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_dtypes_take_norms_in_float32(dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.full((400,), 4000.0).to(dtype))  # its norm, 80000, is no float16
    p.grad = torch.full((400,), 5000.0).to(dtype)
    want = rescaled(p.detach(), p.grad, 0.5, 0.01, 0.02, True, 1e-8)
    LARC(torch.optim.SGD([p], lr=0.5, weight_decay=0.01)).step()
    assert p.grad.dtype == dtype
    torch.testing.assert_close(p.grad.double(), want, rtol=3 * torch.finfo(dtype).eps, atol=0)


def test_groups_have_their_own_rates_and_dtypes_mix() -> None:
    params = [*parameters(torch.float32)[:1], *parameters(torch.float64)[:1], *parameters(torch.float16)[:1]]
    for p in params:
        p.grad = torch.ones_like(p)
    wants = [
        rescaled(params[0].detach(), params[0].grad, 0.0, 0.5, 0.02, True, 1e-8),  # lr 0: clipped to the full gradient
        rescaled(params[1].detach(), params[1].grad, 1.0, 0.0, 0.02, True, 1e-8),
        rescaled(params[2].detach(), params[2].grad, 1.0, 0.0, 0.02, True, 1e-8),
    ]
    groups = [{"params": params[:1], "lr": 0.0, "weight_decay": 0.5}, {"params": params[1:]}]
    larc = LARC(torch.optim.SGD(groups, lr=1.0))
    larc.step()
    for p, want in zip(params, wants, strict=True):
        torch.testing.assert_close(p.grad.double(), want, rtol=2e-3, atol=1e-6)
    assert [g["weight_decay"] for g in larc.param_groups] == [0.5, 0]


def test_weight_decay_comes_back_after_an_error() -> None:
    params = parameters()
    optimizer = torch.optim.Adam(params, weight_decay=0.3)
    larc = LARC(optimizer)
    give_gradients(params, 0)
    seen = []

    def fail(*_: object) -> None:
        seen.append(optimizer.param_groups[0]["weight_decay"])
        raise ArithmeticError

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        larc.step()
    hook.remove()
    assert seen == [0.0] and optimizer.param_groups[0]["weight_decay"] == 0.3
    with pytest.raises(TypeError):
        larc.step(lambda: 0.0)


def test_it_stands_in_for_the_optimizer() -> None:
    params = parameters()
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    larc = LARC(optimizer, trust_coefficient=0.5, clip=False)
    assert larc.optim is optimizer and larc.param_groups is optimizer.param_groups and larc.defaults["lr"] == 0.1
    assert (larc.trust_coefficient, larc.clip, larc.eps) == (0.5, False, 1e-8)
    give_gradients(params, 0)
    larc.step()
    assert larc.state is optimizer.state and params[0] in larc.state
    larc.zero_grad(set_to_none=False)
    assert params[0].grad is not None
    larc.zero_grad()
    assert params[0].grad is None
    larc.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 7.0})
    assert optimizer.param_groups[1]["lr"] == 7.0

    fresh = LARC(
        torch.optim.SGD([{"params": parameters()}, {"params": [nn.Parameter(torch.ones(1))]}], lr=1.0, momentum=0.9)
    )
    fresh.load_state_dict(larc.state_dict())
    assert [g["lr"] for g in fresh.param_groups] == [0.1, 7.0]
    file = io.BytesIO()
    torch.save(larc, file)
    file.seek(0)
    for twin in (copy.deepcopy(larc), pickle.loads(pickle.dumps(larc)), torch.load(file, weights_only=False)):
        assert isinstance(twin, LARC) and twin.trust_coefficient == 0.5
        assert twin.param_groups[1]["lr"] == 7.0 and twin.optim is not optimizer
    groups = [{**g, "lr": 3.0} for g in larc.param_groups]
    larc.param_groups = groups
    larc.state = {}
    assert optimizer.param_groups is groups and optimizer.state == {}
    larc.step = lambda: "replaced"
    assert larc.step() == "replaced"


def test_a_learning_rate_may_be_a_tensor() -> None:
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.ones(4)
    LARC(torch.optim.SGD([p], lr=torch.tensor(0.5))).step()
    torch.testing.assert_close(p.grad, torch.full((4,), 0.02 / 0.5))
