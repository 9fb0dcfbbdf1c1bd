"""PA211: what is counted of second moments is what happened to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from preamp.doctor.follow import updates
from preamp.doctor.records import Rank
from preamp.doctor.tell.report import judge
from tests.doctor._kept import Kept

MADE: dict[str, tuple[str, float, Callable[..., torch.optim.Optimizer]]] = {
    "AdamW": ("exp_avg_sq", 0.999, lambda p: torch.optim.AdamW(p, 1e-2)),
    "Adam": ("exp_avg_sq", 0.999, lambda p: torch.optim.Adam(p, 1e-2, fused=True)),
    "RMSprop": ("square_avg", 0.99, lambda p: torch.optim.RMSprop(p, 1e-3)),
    "Adadelta": ("square_avg", 0.9, lambda p: torch.optim.Adadelta(p)),
}


@pytest.mark.parametrize("kind", MADE)
def test_counts_and_means_are_those_of_the_moments(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "FOLLOWED", 10**6)
    name, beta, make = MADE[kind]
    torch.manual_seed(0)
    model = nn.Linear(16, 8).bfloat16()
    optimizer = make(model.parameters())
    kept, exact, same = Kept(), [torch.zeros(())] * 2, 0
    with preamp.doctor.watch(model, every=5, sinks=[kept]):
        for step in range(21):
            model(torch.randn(4, 16).bfloat16()).float().square().mean().backward()
            before = [optimizer.state[p][name].clone() if step else None for p in model.parameters()]
            optimizer.step()
            for index, p in enumerate(model.parameters()):
                assert p.grad is not None
                now = optimizer.state[p][name]
                # The following begins with the moment that the first step has left.
                exact[index] = exact[index].lerp(p.grad.float().square(), 1 - beta) if step else now.float()
                if step == 20:
                    same += int(((now == before[index]) & (p.grad != 0)).sum())
            optimizer.zero_grad()
    last = kept.of("moments")[-1]
    assert last["step"] == 20 and last["total"] == 136 and last["same"] == same
    assert last["exact"] == pytest.approx(sum(float(each.sum()) for each in exact), rel=1e-4)
    stored = sum(float(optimizer.state[p][name].float().sum()) for p in model.parameters())
    assert last["stored"] == pytest.approx(stored, rel=1e-4)


@pytest.mark.parametrize("make", [
    lambda p: preamp.optim.AdamW(p, 1e-2, master=None, rounding="stochastic"),
    lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
])  # fmt: skip
def test_what_rounds_stochastically_or_has_no_second_moment_is_not_judged(make: Callable[..., Any]) -> None:
    model, kept = nn.Linear(8, 8).bfloat16(), Kept()
    optimizer = make(model.parameters())
    with preamp.doctor.watch(model, every=1, sinks=[kept]):
        for _ in range(3):
            model(torch.randn(4, 8).bfloat16()).float().square().mean().backward()
            optimizer.step()
    assert not kept.of("moments")


@pytest.mark.parametrize(("shares", "first"), [((0.1, 0.4, 0.49), None), ((0.2, 0.6, 0.7), 50), ((0.6, 0.2), None)])
def test_half_of_the_moments_at_the_last_look(shares: tuple[float, ...], first: int | None) -> None:
    rank = Rank(0)
    rank.write("step", {"step": 0, "scale": None, "skipped": False, "bad": None, "schedules": 0, "updates": 0})
    for index, share in enumerate(shares):
        rank.write("moments", {
            "step": 50 * index, "optimizer": "AdamW", "file": "train.py", "line": 3, "module": "", "dtype": "bf16",
            "same": int(1000 * share), "total": 1000, "stored": 3.0, "exact": 2.0,
        })  # fmt: skip
    found = [one for one in judge(rank) if one.code == "PA211"]
    assert [one.step for one in found] == ([] if first is None else [first])
    for one in found:
        assert "1.5 times" in one.message and (one.file, one.line, one.op) == ("train.py", 3, "AdamW")
