"""PA211: what is counted of second moments is what happened to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from preamp.doctor.findings.check import Check, Listeners, on
from preamp.doctor.findings.pa211 import PA211
from preamp.doctor.follow.watch import Watch
from preamp.doctor.places import Place
from preamp.doctor.shadow.facts import Absorbed
from preamp.report import Finding

MADE: dict[str, tuple[str, float, Callable[..., torch.optim.Optimizer]]] = {
    "AdamW": ("exp_avg_sq", 0.999, lambda p: torch.optim.AdamW(p, 1e-2)),
    "Adam": ("exp_avg_sq", 0.999, lambda p: torch.optim.Adam(p, 1e-2, fused=True)),
    "RMSprop": ("square_avg", 0.99, lambda p: torch.optim.RMSprop(p, 1e-3)),
    "Adadelta": ("square_avg", 0.9, lambda p: torch.optim.Adadelta(p)),
}


class Looking(Check):
    def __init__(self, looks: list[Absorbed]) -> None:
        self._looks = looks

    @on(Absorbed)
    def absorbed(self, event: Absorbed) -> tuple[Finding, ...]:
        self._looks.append(event)
        return ()


def judged(events: list[Absorbed]) -> list[Finding]:
    return [finding for event in events for finding in PA211().absorbed(event)]


@pytest.mark.parametrize("kind", MADE)
def test_what_is_counted_is_what_happened_to_the_moments(kind: str) -> None:
    name, beta, make = MADE[kind]
    torch.manual_seed(0)
    model = nn.Linear(16, 8).bfloat16()
    optimizer = make(model.parameters())
    looks: list[Absorbed] = []
    moved = stayed = 0
    with preamp.doctor.watch(model, every=5):
        assert Watch.current is not None
        Watch.current.run.emit = Listeners([Looking(looks)], lambda finding: None)
        for step in range(21):
            model(torch.randn(4, 16).bfloat16()).float().square().mean().backward()
            before = [optimizer.state[p][name].clone() if step else None for p in model.parameters()]
            optimizer.step()
            for index, p in enumerate(model.parameters()):
                old = before[index]
                if step == 19 and old is not None and p.grad is not None:
                    exact = old.float().lerp(p.grad.float().square(), 1 - beta)
                    moved += int((exact != old).sum())
                    stayed += int(((exact != old) & (optimizer.state[p][name] == old)).sum())
            optimizer.zero_grad()
    last = [event for event in looks if event.is_moment][-1]
    assert (last.step, last.moved, last.optimizer, last.dtype) == (19, moved, optimizer, "bf16")
    assert last.stayed == stayed
    assert last.parameters == list(model.parameters())


def test_weights_that_are_moved_outside_of_a_step_are_no_average() -> None:
    """Sharpness-aware minimisation moves them there and back."""
    model = nn.Linear(16, 8).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with preamp.doctor.watch(model) as seen:
        for _ in range(2):
            model(torch.randn(4, 16).bfloat16()).float().square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(p * 1e-4)
            optimizer.step()
            optimizer.zero_grad()
    (found,) = [one for one in seen.findings if one.code == "PA212"]
    assert found.message.startswith("weights in bf16") and "model.float()" in str(found.fix)


@pytest.mark.parametrize("make", [
    lambda p: preamp.optim.AdamW(p, 1e-2, master=None, rounding="stochastic"),
    lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
])  # fmt: skip
def test_what_rounds_stochastically_or_has_no_second_moment_is_not_judged(make: Callable[..., Any]) -> None:
    model = nn.Linear(8, 8).bfloat16()
    optimizer = make(model.parameters())
    with preamp.doctor.watch(model, every=1) as w:
        for _ in range(3):
            model(torch.randn(4, 8).bfloat16()).float().square().mean().backward()
            optimizer.step()
    assert not [one for one in w.findings if one.code == "PA211"]


@pytest.mark.parametrize(("stayed", "found"), [(10, False), (49, False), (50, True), (90, True)])
def test_half_of_the_moments_that_a_step_would_move(stayed: int, found: bool) -> None:
    optimizer = torch.optim.AdamW([torch.zeros(1)])
    place = Place(None, None, None, "forward")
    event = Absorbed(
        "exp_avg_sq", "bf16", place, optimizer, is_moment=True, moved=100, stayed=stayed, made_at=("train.py", 3)
    )
    assert bool(judged([event])) is found
    assert not judged([replace(event, is_moment=False)])
    for one in judged([event]):
        assert (one.file, one.line, one.op) == ("train.py", 3, "AdamW")
