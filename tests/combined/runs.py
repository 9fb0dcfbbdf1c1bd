"""A small network of equal blocks and a whole training run of it, which the tests change in one place and compare."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import preamp

from ..session.toys import masters_in

LEVELS = ("O0", "O1", "O2", "O4", "O5")
LOW = {"O0": torch.float32, "O1": torch.float16, "O2": torch.float16, "O4": torch.bfloat16, "O5": torch.bfloat16}
OUTPUT = {**LOW, "O2": torch.float32, "O5": torch.float32}
"""What a model gives back: float32 where the level says so."""
MICRO, STEPS, BAD = 2, 4, 2
"""Micro-batches a step, steps, and the step whose second micro-batch holds an infinity."""


class Block(nn.Module):
    """Attention written out, so that it needs the softmax rule, and a norm."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The stream plus what attention adds to it."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        attended = (q @ k.transpose(-1, -2)).softmax(-1).to(v.dtype) @ v
        return x + self.out(F.gelu(attended))


class Net(nn.Module):
    """Three equal blocks between two linear layers; `through` runs a block, and a test may put a checkpoint there."""

    def __init__(self, through: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 3)
        self.through = through

    def forward(self, x: Tensor) -> Tensor:
        """Logits, one row a sample."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.through is None else self.through(block, x)
        return self.head(x.mean(1))


def batch(index: int, size: int = 4, *, bad: bool = False) -> tuple[Tensor, Tensor]:
    """Inputs of shape (size, 5, 6) and their classes; with `bad`, one entry is infinite."""
    generator = torch.Generator().manual_seed(100 + index)
    x = torch.randn(size, 5, 6, generator=generator)
    y = x.mean(1)[:, :3].argmax(1)
    if bad:
        x[0, 0, 0] = torch.inf
    return x, y


def loss_under(session: preamp.Session, model: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Forward pass and loss in the session's region, as one function."""

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with session.autocast():
            return F.cross_entropy(model(x), y)

    return loss_of


@dataclass
class Run:
    """What a training run came to."""

    losses: list[float] = field(default_factory=list)
    skips: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    """Those of the first step, as they rest before it: scaled, in the dtype of their parameters."""
    weights: list[Tensor] = field(default_factory=list)


def prepared(model: nn.Module, level: str, **given: Any) -> preamp.Session:
    """A session with an optimizer of preamp's, and a scale that only a bad batch overflows."""
    optimizer = preamp.optim.AdamW(model.parameters(), 1e-2)
    if level in ("O1", "O2"):
        names = given.get("losses", ("loss",))
        given = {"scale": {name: preamp.DynamicScale(2.0**8, growth_interval=2) for name in names}, **given}
    return preamp.prepare(model, optimizer, **({} if "policy" in given else {"level": level}), **given)


def train(
    level: str,
    model: nn.Module | None = None,
    *,
    after: Callable[[nn.Module], Any] = lambda model: model,
    whole: Callable[[Callable[..., Tensor]], Callable[..., Tensor]] = lambda function: function,
    sizes: tuple[int, ...] = (4,),
    bad: int | None = BAD,
    **given: Any,
) -> Run:
    """Train `STEPS` steps of `MICRO` micro-batches, clipped, one of them spoiled.

    `after`: what happens to the model once it is prepared. `whole`: what happens to the function of forward pass and
    loss. `sizes`: of batches, by turns.
    """
    model = Net() if model is None else model
    run = Run()
    with prepared(model, level, **given) as session:
        loss_of = whole(loss_under(session, after(model)))
        for step in range(STEPS):
            for i in range(MICRO):
                index = MICRO * step + i
                x, y = batch(index, sizes[index % len(sizes)], bad=step == bad and i == MICRO - 1)
                loss = loss_of(x, y)
                session.backward(loss / MICRO, sync=i == MICRO - 1)
                run.losses.append(float(loss.detach()))
            if step == 0:
                run.grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            session.clip_grad_norm_(1.0)
            run.skips.append(session.step().skipped)
            session.zero_grad()
            run.scales.append(session.loss_scale())
        run.weights = [*(p.detach().clone() for p in model.parameters()), *masters_in(session.state_dict())]
        run.weights = [weight.clone() for weight in run.weights]
    return run


reference = functools.lru_cache(train)
"""The run as it is, once for every choice of level and policy."""


def check_same(ours: Run, plain: Run, tolerance: float = 0.0) -> None:
    """Two runs came to the same: bit for bit; or, with a tolerance, in losses and in the first step's gradients.

    Weights are left out of the latter: Adam divides by a gradient's magnitude, so that where the true gradient is zero
    (a key's bias under softmax) rounding alone says where a weight goes, at full speed.
    """
    assert ours.skips == plain.skips and ours.scales == plain.scales
    assert any(plain.skips) == (BAD < STEPS)
    assert len(ours.grads) == len(plain.grads) > 0 and len(ours.weights) == len(plain.weights) > 0
    losses = torch.tensor(ours.losses), torch.tensor(plain.losses)
    assert torch.allclose(*losses, rtol=tolerance, atol=0.0, equal_nan=True)
    for mine, theirs in zip(ours.grads, plain.grads, strict=True):
        assert mine.dtype is theirs.dtype
        assert torch.equal(mine, theirs) or (mine - theirs).float().norm() <= tolerance * theirs.float().norm()
    for mine, theirs in zip(ours.weights, plain.weights, strict=True):
        assert mine.dtype is theirs.dtype
        assert tolerance > 0.0 or torch.equal(mine, theirs)
