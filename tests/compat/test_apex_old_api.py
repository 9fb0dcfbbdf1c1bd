"""The API of 2018: amp.init, handle.scale_loss, wrapped optimizers. Apex's last releases refused it; here it works."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from preamp.compat.apex import amp
from preamp.compat.apex.amp import amp as amp_module
from preamp.compat.apex.amp.handle import OptimWrapper

from .toys import Weights, batch, mlp

ONES = torch.ones(3)
INF = torch.tensor([1.0, math.inf, 1.0])


def test_handles() -> None:
    off: Any = amp.init(enabled=False)
    assert not off.is_active() and amp_module._DECORATOR_HANDLE is off and not hasattr(amp._amp_state, "handle")
    loss = torch.zeros(())
    with off.scale_loss(loss, None) as same:
        assert same is loss
    with off._disable_casts():
        pass
    assert not off.has_cache and not off.verbose
    off._clear_cache()
    off._deactivate()
    on: Any = amp.init(enable_caching=False, verbose=True)
    assert on.is_active() and amp_module._DECORATOR_HANDLE is on and amp._amp_state.handle is on
    assert not on.has_cache and on.verbose and on.cache == {}
    with on._disable_casts():
        assert not on.is_active()
    assert on.is_active()


def test_handle_scale_loss_trains_and_skips(capsys: pytest.CaptureFixture[str]) -> None:
    handle: Any = amp.init(enabled=True)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for i in range(12):
        x, y = batch(0)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if i == 5:
            loss = loss * math.inf
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        before = [p.clone() for p in model.parameters()]
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)) == (i == 5)
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0" in capsys.readouterr().out


def test_wrapped_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    handle: Any = amp.init()
    model = Weights()
    optimizer: Any = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), 0.25, momentum=0.5), num_loss=2)
    assert isinstance(optimizer, OptimWrapper)
    assert optimizer.param_groups[0]["lr"] == 0.25  # everything else is the optimizer's
    for given in (ONES, ONES * 2):
        with optimizer.scale_loss(model(given)) as scaled:
            scaled.backward()
    assert model.weight.grad is not None and torch.equal(model.weight.grad, ONES * 3)
    optimizer.step()
    assert torch.equal(model.weight, ONES * 0.25)
    optimizer.zero_grad()
    for given in (ONES, INF):
        with optimizer.scale_loss(model(given)) as scaled:
            scaled.backward()
    optimizer.step()
    assert torch.equal(model.weight, ONES * 0.25)
    assert "loss scaler 1 reducing loss scale to 32768.0" in capsys.readouterr().out
    assert [s.loss_scale() for s in optimizer._loss_scaler] == [65536.0, 32768.0]
    for _ in range(2):
        with optimizer.scale_loss(model(ONES)) as scaled:
            scaled.backward()
    with pytest.raises(IndexError), optimizer.scale_loss(model(ONES)):
        pass
