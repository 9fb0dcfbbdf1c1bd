"""LAMB and NovoGrad against their formulas in float64, and through the same doors as the others."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import preamp
from preamp.errors import OptimizerError
from preamp.ledger import NoMasters
from preamp.optim import LAMB, NovoGrad

SHAPES = [(4, 3), (7,), (1,), (2, 3, 2)]


class Lamb64:
    """You et al. 2020, algorithm 2, with bias correction and a limit on the norm of all gradients."""

    def __init__(self, params: list[Tensor], lr: float, decay: float, limit: float | None) -> None:
        self.p = [p.double() for p in params]
        self.m, self.v = [torch.zeros_like(p) for p in self.p], [torch.zeros_like(p) for p in self.p]
        self.lr, self.decay, self.limit, self.t = lr, decay, limit, 0

    def step(self, grads: list[Tensor]) -> None:
        self.t += 1
        norm = torch.cat([g.double().flatten() for g in grads]).norm()
        shrink = 1.0 if self.limit is None else max(1.0, float(norm) / self.limit)
        for i, gradient in enumerate(grads):
            g = gradient.double() / shrink
            self.m[i] = 0.9 * self.m[i] + 0.1 * g
            self.v[i] = 0.999 * self.v[i] + 0.001 * g * g
            m, v = self.m[i] / (1 - 0.9**self.t), self.v[i] / (1 - 0.999**self.t)
            update = m / (v.sqrt() + 1e-6) + self.decay * self.p[i]
            w, u = float(self.p[i].norm()), float(update.norm())
            trust = w / u if w > 0 and u > 0 and self.decay else 1.0
            self.p[i] = self.p[i] - self.lr * trust * update


class NovoGrad64:
    """Ginsburg et al. 2019, with bias correction."""

    def __init__(self, params: list[Tensor], lr: float, decay: float, limit: float | None) -> None:
        self.p = [p.double() for p in params]
        self.m, self.v = [torch.zeros_like(p) for p in self.p], [0.0] * len(params)
        self.lr, self.decay, self.t = lr, decay, 0

    def step(self, grads: list[Tensor]) -> None:
        self.t += 1
        for i, gradient in enumerate(grads):
            g = gradient.double()
            square = float((g * g).sum())
            self.v[i] = square if self.t == 1 else 0.999 * self.v[i] + 0.001 * square
            self.m[i] = 0.9 * self.m[i] + 0.1 * g
            root = (self.v[i] ** 0.5) / (1 - 0.999**self.t) ** 0.5
            update = (self.m[i] / (1 - 0.9**self.t)) / (root + 1e-8) + self.decay * self.p[i]
            self.p[i] = self.p[i] - self.lr * update


def made(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    torch.manual_seed(3)
    return [Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def give(params: list[Parameter], step: int) -> list[Tensor]:
    torch.manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape).to(p.dtype)
    return [p.grad for p in params]


CASES: dict[str, tuple[Callable[[list[Parameter]], torch.optim.Optimizer], Callable[[list[Tensor]], object]]] = {
    "LAMB": (lambda p: LAMB(p, 1e-2), lambda p: Lamb64(p, 1e-2, 0.01, 1.0)),
    "LAMB without limit and decay": (
        lambda p: LAMB(p, 1e-2, weight_decay=0.0, max_grad_norm=None),
        lambda p: Lamb64(p, 1e-2, 0.0, None),
    ),
    "LAMB in two groups": (
        lambda p: LAMB([{"params": p[:2]}, {"params": p[2:]}], 1e-2),
        lambda p: Lamb64(p, 1e-2, 0.01, 1.0),
    ),
    "NovoGrad": (lambda p: NovoGrad(p, 1e-2), lambda p: NovoGrad64(p, 1e-2, 0.0, None)),
    "NovoGrad with decay": (
        lambda p: NovoGrad(p, 1e-2, weight_decay=0.1),
        lambda p: NovoGrad64(p, 1e-2, 0.1, None),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_by_the_formula(name: str) -> None:
    ours, formula = CASES[name]
    params = made()
    optimizer, reference = ours(params), formula([p.detach().clone() for p in params])
    for step in range(25):
        reference.step([g.clone() for g in give(params, step)])
        optimizer.step()
    for p, q in zip(params, reference.p, strict=True):
        assert torch.allclose(p.detach().double(), q, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_parameters_and_a_state_that_goes_on(name: str, dtype: torch.dtype) -> None:
    ours, _ = CASES[name]
    params, wide = made(dtype), made()
    with torch.no_grad():
        for p, q in zip(params, wide, strict=True):
            q.copy_(p)
    optimizer, reference = ours(params), ours(wide)
    for step in range(10):
        for q, gradient in zip(wide, give(params, step), strict=True):
            q.grad = gradient.float()
        optimizer.step()
        reference.step()
        if step == 4:
            state = optimizer.state_dict()
            optimizer = ours(params)
            optimizer.load_state_dict(state)
    for p, q in zip(params, wide, strict=True):
        assert torch.equal(optimizer.state[p]["master"], q.detach()) and torch.equal(p, q.to(dtype))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_states_without_masters_are_saved_to_the_bit(name: str, dtype: torch.dtype) -> None:
    """Moments have the dtype of the parameters then; NovoGrad's norms stay float32, also when they are loaded."""
    ours, _ = CASES[name]

    def run(saves: bool) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        params = made(dtype)
        optimizer = ours(params)
        optimizer.lend(NoMasters())  # as a session at O3
        for step in range(6):
            give(params, step)
            optimizer.step()
            if saves and step == 3:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = ours(params)
                optimizer.lend(NoMasters())
                optimizer.load_state_dict(state)
        return [p.detach() for p in params], [optimizer.state[p] for p in params]

    (kept, before), (loaded, after) = run(False), run(True)
    assert all(map(torch.equal, kept, loaded))
    for one, other in zip(before, after, strict=True):
        assert {n: v.dtype for n, v in one.items()} == {n: v.dtype for n, v in other.items()}
        assert all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("name", CASES)
def test_under_a_scaler_and_a_session(name: str) -> None:
    """Scaled gradients come to the same as true ones, and a bad step changes nothing."""
    ours, _ = CASES[name]
    plain, scaled = made(), made()
    one, two = ours(plain), ours(scaled)
    scaler = preamp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(8):
        give(plain, step)
        give(scaled, step)
        scaler.scale(torch.zeros(()))
        with torch.no_grad():
            for p in scaled:
                p.grad *= scaler.get_scale()
        if step == 3:
            scaled[1].grad[2] = float("nan")
        else:
            one.step()
        scaler.step(two)
        scaler.update()
    for p, q in zip(plain, scaled, strict=True):
        assert torch.equal(p, q)


def test_bad_arguments() -> None:
    with pytest.raises(OptimizerError, match="norm_type=1"):
        NovoGrad(made(), norm_type=1)
    with pytest.raises(OptimizerError, match="max_grad_norm=-1"):
        LAMB(made(), max_grad_norm=-1.0)
    with pytest.raises(OptimizerError, match="eps"):
        LAMB(made(), eps=-1e-8)
