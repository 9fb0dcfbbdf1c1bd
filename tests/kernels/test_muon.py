"""Muon: near the plain maths, which it does in bfloat16 as torch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from preamp.kernels import momentum
from preamp.kernels.bits import join, split

from . import calls as fused
from . import plain
from .steps import gradients

MUON: dict[str, Any] = {
    "lr": 1e-2, "weight_decay": 0.0, "momentum": 0.95, "nesterov": True, "ns_coefficients": (3.4445, -4.775, 2.0315),
    "eps": 1e-7, "ns_steps": 5, "adjust_lr_fn": None, "maximize": False,
}  # fmt: skip
SETTINGS = [
    MUON,
    {**MUON, "nesterov": False, "weight_decay": 0.1, "maximize": True},
    {**MUON, "adjust_lr_fn": "match_rms_adamw", "momentum": 0.8, "ns_steps": 3},
]
SHAPES = [(17, 61), (61, 17), (17, 61), (8, 8), (1, 5), (5, 1), (0, 4), (40, 30)]


def matrices() -> list[Tensor]:
    torch.manual_seed(3)
    return [*(torch.randn(shape) for shape in SHAPES), torch.randn(24, 40).t()]


def stepped(options: dict[str, Any], kind: str, steps: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    """(parameters in float32, moments) after steps of which the second is skipped."""
    params = matrices()
    bits: list[Tensor] | None = None
    copies = [p.to(torch.float16) for p in params] if kind == "copies" else None
    if kind == "split":
        halves = [split(p) for p in params]
        params, bits = [w for w, _ in halves], [b for _, b in halves]
    elif kind == "stochastic":
        params = [p.to(torch.bfloat16) for p in params]
    moments = [torch.zeros_like(p, dtype=torch.float32) for p in params]
    count = torch.zeros(()) if kind == "stochastic" else None
    for i in range(steps):
        grads = gradients(params, torch.bfloat16, i, same_layout=i != 1)
        found = torch.tensor(float(i == 1))
        if i == 1:
            grads[0].fill_(torch.nan)
        fused.muon_(
            params, grads, moments, copies, count, bits=bits, stochastic_rounding=kind == "stochastic", seed=5,
            factor=torch.tensor(0.5), found=found, **options,
        )  # fmt: skip
    assert count is None or float(count) == steps - 1
    for p, copy in zip(params, copies or [], strict=copies is not None):
        assert torch.equal(copy, p.to(copy.dtype))
    return (list(map(join, params, bits)) if bits else [p.float() for p in params]), moments


@pytest.mark.parametrize("options", SETTINGS, ids=range(len(SETTINGS)))
def test_plain_maths(options: dict[str, Any]) -> None:
    params = matrices()
    del params[6]  # without elements
    wanted = plain.Muon(params, options)
    moments = [torch.zeros_like(p) for p in params]
    before = [p.clone() for p in params]
    for i in range(5):
        grads = gradients(params, torch.float32, i)
        wanted.step(grads)
        fused.muon_(params, grads, moments, None, None, **options)
    for p, w, m, wm, old in zip(params, wanted.params, moments, wanted.states["m"], before, strict=True):
        torch.testing.assert_close(m.double(), wm, rtol=1e-5, atol=1e-6)
        moved = (w - old.double()).norm()
        assert (p.double() - w).norm() <= 0.05 * moved  # five products of bfloat16 numbers a step


def test_matrices_are_taken_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model's matrices are not copied at once, and no two draw the same random numbers."""
    for kind in ("copies", "stochastic"):
        at_once, _ = stepped(MUON, kind)
        monkeypatch.setattr(momentum, "TOGETHER_ON_CPU", 1)
        one_by_one, _ = stepped(MUON, kind)
        monkeypatch.undo()
        apart = [float((a - b).abs().max()) for a, b in zip(at_once, one_by_one, strict=True) if a.numel()]
        assert max(apart) <= (2**-7 * 4 if kind == "stochastic" else 2e-4)
    assert list(momentum.alike(SHAPES, 17 * 61)) == [[0], [2], [1], [3], [4], [5], [6], [7]]
    assert list(momentum.alike(SHAPES, 2**20)) == [[0, 2], [1], [3], [4], [5], [6], [7]]
