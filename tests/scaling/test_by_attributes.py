"""Optimizers that are told scale and flag: by attributes, as torch's fused ones are, or by the older protocol."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import preamp

SCALERS = [torch.amp.GradScaler, preamp.GradScaler]
EACH = pytest.mark.parametrize("kind", SCALERS)


def fused(params: list[Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.5, fused=True)


def backward(scaler: torch.amp.GradScaler, param: Parameter, by: float = 1.0) -> None:
    param.grad = None
    scaler.scale((param * by).sum()).backward()


@EACH
def test_a_scale_of_the_scripts_own_multiplies(kind: type[torch.amp.GradScaler]) -> None:
    """Gradients that the script has scaled too, by something it tells the optimizer."""
    param = Parameter(torch.ones(3))
    optimizer, scaler = fused([param]), kind("cpu", init_scale=4.0)
    backward(scaler, param, by=8.0)
    optimizer.grad_scale = torch.tensor(8.0)
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [0.5] * 3
    backward(scaler, param, by=8.0)
    scaler.unscale_(optimizer)
    optimizer.grad_scale = torch.tensor(8.0)
    scaler.step(optimizer)
    assert param.tolist() == [0.0] * 3
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()


@EACH
def test_the_older_protocol(kind: type[torch.amp.GradScaler]) -> None:
    class Older(torch.optim.SGD):
        _step_supports_amp_scaling = True
        given: Any = None

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Tensor | None:  # type: ignore[override]
            self.given = grad_scaler
            grad_scaler.unscale_(self)
            return super().step(closure)

    param = Parameter(torch.ones(3))
    optimizer, scaler = Older([param], 0.5), kind("cpu", init_scale=4.0)
    backward(scaler, param)
    with pytest.warns(FutureWarning, match="going to stop passing itself"):
        scaler.step(optimizer)
    assert optimizer.given is scaler and param.tolist() == [0.5] * 3


@EACH
def test_schedulers_that_wrap_the_step(kind: type[torch.amp.GradScaler]) -> None:
    param = Parameter(torch.ones(3))
    optimizer, scaler = fused([param]), kind("cpu", init_scale=4.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for expected in (0.5, 0.25):
        backward(scaler, param)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        assert param.tolist() == [expected] * 3


def test_an_exception_leaves_nothing_behind() -> None:
    """torch's scaler leaves both attributes, and the next step is divided by the old scale as well."""
    param = Parameter(torch.ones(3))
    optimizer, scaler = fused([param]), preamp.GradScaler("cpu", init_scale=4.0)
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    backward(scaler, param)
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
    handle.remove()
    scaler.step(optimizer)
    assert param.tolist() == [0.5] * 3


def test_gradients_that_came_after_the_check() -> None:
    """They are scaled, and nobody has looked at them: an error, where torch's fails at an attribute."""
    param = Parameter(torch.ones(3))
    optimizer, scaler = fused([param]), preamp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    backward(scaler, param)
    with pytest.raises(AssertionError, match="it had no gradients when it was checked"):
        scaler.step(optimizer)
    assert param.tolist() == [1.0] * 3
