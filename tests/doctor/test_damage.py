"""A step with gradients that are not finite: whether it was taken is seen by the weights, whoever wrote them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from preamp.optim import SGD

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach": lambda params: torch.optim.SGD(params, 0.1, foreach=True),
    "fused": lambda params: torch.optim.SGD(params, 0.1, fused=True),  # counts no writes
    "one by one": lambda params: torch.optim.SGD(params, 0.1, foreach=False),
    "preamp": lambda params: SGD(params, 0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("checks", [True, False])
def test_damage_is_told_once(kind: str, checks: bool) -> None:
    """The disease and not its consequences; nothing after a step that the script held back."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = OPTIMIZERS[kind](model.parameters())
    with preamp.doctor.watch(model) as watch:
        for step in range(6):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean()
            if step == 3:
                loss = loss * float("inf")
            loss.backward()
            if not checks or loss.isfinite():
                optimizer.step()
    (finding,) = [finding for finding in watch.findings if finding.code == "PA201"]
    assert finding.step == 3 and "mul" in str(finding.op)
    assert bool(model.weight.isfinite().all()) is checks


def test_a_scale_that_has_fallen_to_zero_is_observed_on() -> None:
    """torch's scaler halves without an end; one that starts a few halvings above 0 is there after as many steps."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-147)
    with preamp.doctor.watch(model, every=1) as watch:
        for _ in range(8):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = torch.log(model(torch.randn(8, 4)) * 0).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 0.0
    assert "failed" not in watch.report().verdict
    assert {"PA201", "PA203"} <= {finding.code for finding in watch.findings}
